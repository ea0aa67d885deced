"""Views of records on a terminal, drawn by rich. Imports records, metrics and printable only."""

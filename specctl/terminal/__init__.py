"""Output on a terminal or in a log: text, messages, progress, records. Imports only records, metrics and printable."""

"""What a terminal or a log shows: text, messages, progress, views of records. Imports records, metrics and printable only."""

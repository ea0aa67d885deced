"""What a terminal or a log shows: text, messages, progress, records. Imports records, metrics and printable only."""

"""Rich views of records; nothing here knows a model."""

"""The pair behind an HTTP interface."""

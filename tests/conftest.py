"""Lets every test import the shared helpers: pytest puts this file's folder on the path."""

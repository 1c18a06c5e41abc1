"""Rows that inspect shows, as values; nothing here prints or changes anything."""

"""The Python client of the HTTP interface; knows no Redis."""

"""The forms that records may have, one a file, and what becomes of a record of each."""

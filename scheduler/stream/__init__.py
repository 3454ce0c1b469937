"""Plans a run as one stream of ticks, while jobs come and go."""

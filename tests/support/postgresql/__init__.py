"""PostgreSQL for tests: own servers in temporary folders, and PgBouncer in front of them."""

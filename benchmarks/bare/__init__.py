"""The hand-written side: the least code that does the same durable work with asyncpg. No SDK, no function, no tenancy."""

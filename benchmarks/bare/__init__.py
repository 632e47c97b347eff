"""The hand-written side: the least code that does the same durable work with asyncpg; no SDK, function or tenancy."""

"""What both SDKs of Relay Dispatch stand on: the protocol in PostgreSQL, its errors and its models."""

__all__: list[str] = []

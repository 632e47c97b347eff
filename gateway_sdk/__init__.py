"""The gateway's side of Relay Dispatch: enqueue work for a relay and wait for its result."""

__all__: list[str] = []

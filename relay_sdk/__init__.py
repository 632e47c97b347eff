"""The relay's side of Relay Dispatch: claim work, run its handler, complete it once."""

__all__: list[str] = []

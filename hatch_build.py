"""Put the files that live outside the packages into a wheel.

A static `force-include` would copy them into editable installs too, where the copies age unseen.
"""

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

PACKAGE_DATA = {
    "migrations": "dispatch_core/migrations",
    "examples/requests.jsonl": "gateway_sdk/demo_requests.jsonl",
}


class PackageDataHook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version != "editable":
            build_data["force_include"].update(PACKAGE_DATA)

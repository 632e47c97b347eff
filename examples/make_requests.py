"""Write examples/requests.jsonl, the requests of `relay-dispatch demo`; the same file each time.

    python examples/make_requests.py > examples/requests.jsonl

Each line is one request of one tenant, and says by `expect` how it must end, so that the demo can check itself.
"""

from __future__ import annotations

import hashlib
import json
import random
from decimal import ROUND_HALF_UP, Decimal

TENANTS = ("acme", "globex", "initech")
PRODUCTS = (("bolt-m8", "0.12"), ("bracket", "3.95"), ("hinge", "7.40"), ("pump", "249.00"), ("valve", "31.50"))
TAXES = ("0.081", "0.19", "0.20")
# 500 in all.
SHARES = {
    "TotalOrder": 270,
    "HashDocument": 60,
    "RunReport": 45,
    "ReserveStock": 75,
    "QuoteNow": 30,
    "SendFax": 20,
}


def total_order(rng: random.Random, reference: str) -> dict[str, object]:
    lines = [
        {"product": product, "quantity": rng.randint(1, 40), "price": price}
        for product, price in rng.sample(PRODUCTS, rng.randint(1, 4))
    ]
    tax = rng.choice(TAXES)
    net = sum((Decimal(str(line["price"])) * int(str(line["quantity"])) for line in lines), Decimal())
    gross = (net * (1 + Decimal(tax))).quantize(Decimal("0.01"), ROUND_HALF_UP)
    return {
        "relay": "erp",
        "json": {"order": reference, "lines": lines, "tax": tax},
        "expect": {"status": "succeeded", "json": {"net": f"{net:.2f}", "gross": str(gross)}},
    }


def hash_document(rng: random.Random, reference: str) -> dict[str, object]:
    seed = rng.randrange(1000)
    # What the demo makes of `document`: see `relay-dispatch demo --help`.
    body = hashlib.shake_256(str(seed).encode()).digest(200_000)
    return {
        "relay": "archive",
        "headers": {"content-type": "application/octet-stream", "x-document": reference},
        "document": {"kb": 200, "seed": seed},
        "expect": {"status": "succeeded", "json": {"sha256": hashlib.sha256(body).hexdigest(), "bytes": len(body)}},
    }


def run_report(rng: random.Random, reference: str) -> dict[str, object]:
    return {
        "relay": "archive",
        "json": {"report": reference, "seconds": rng.choice((0.8, 1.2, 2.0))},
        "ttl": 60,
        "expect": {"status": "succeeded"},
    }


def reserve_stock(rng: random.Random, reference: str) -> dict[str, object]:
    failures = rng.choices((0, 1, 2, 9), (40, 30, 20, 10))[0]
    return {
        "relay": "erp",
        # The warehouse refuses the first tries: once or twice is mended by another, nine times is not.
        "json": {
            "order": reference,
            "product": rng.choice(PRODUCTS)[0],
            "quantity": rng.randint(1, 20),
            "failures": failures,
        },
        "headers": {"x-warehouse": ["north", "south"]},
        "max_attempts": 4,
        "expect": {"status": "failed", "error": "WAREHOUSE-BUSY"}
        if failures > 3
        else {"status": "succeeded", "json": {"reserved": True, "attempt": failures + 1}},
    }


def quote_now(rng: random.Random, reference: str) -> dict[str, object]:
    return {
        "relay": "erp",
        "json": {"order": reference, "product": rng.choice(PRODUCTS)[0], "seconds": 30},
        "ttl": 1,
        "expect": {"status": "expired"},
    }


def send_fax(rng: random.Random, reference: str) -> dict[str, object]:
    greeting = rng.choice(("Good morning", "Good evening"))
    return {
        "relay": "erp",
        "body": f"{greeting}: order {reference} is ready.",
        "expect": {"status": "failed", "error": "S2R-UNKNOWN-OPERATION"},
    }


MAKERS = {
    "TotalOrder": total_order,
    "HashDocument": hash_document,
    "RunReport": run_report,
    "ReserveStock": reserve_stock,
    "QuoteNow": quote_now,
    "SendFax": send_fax,
}


def main() -> None:
    rng = random.Random(2)
    operations = [operation for operation, share in SHARES.items() for _ in range(share)]
    rng.shuffle(operations)
    lines = []
    for number, operation in enumerate(operations, start=1):
        tenant = rng.choices(TENANTS, (5, 3, 2))[0]
        request = {"tenant": tenant, "operation": operation} | MAKERS[operation](rng, f"{tenant}-{number:04}")
        lines.append(json.dumps(request, separators=(",", ":")))
    # Two that are no good: cut off in the middle, and a header that is no text. They are reported and skipped.
    lines.insert(150, '{"tenant":"acme","operation":"TotalOrder","relay":"erp","json":{"order":"acme-')
    lines.insert(
        350, '{"tenant":"globex","operation":"SendFax","relay":"erp","body":"hello","headers":{"x-priority":1}}'
    )
    print("\n".join(lines))


if __name__ == "__main__":
    main()

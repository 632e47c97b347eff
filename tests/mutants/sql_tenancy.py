"""Mutants of what keeps tenants, relays and logins apart, in all rooms. Machines play with logins that may do all."""

from __future__ import annotations

from functools import partial

from tests.mutants.mutant import Mutant

_F = "migrations/functions/"
_OWN = "b.role_oid = to_regrole(quote_ident(session_user))"

_bindings = "test_tenancy_bindings.py::"
_REFUSED = f"{_bindings}test_each_verb_is_refused_for_every_tenant_and_relay_that_the_login_is_not_bound_to"
_KIND = f"{_bindings}test_a_binding_of_one_kind_opens_no_verb_of_another_kind"
_ENDS = (
    "test_tenancy_transactions.py::test_two_verbs_for_two_tenants_and_then_an_unbound_one_in_one_transaction_is_unbound"
)
_edges = "test_tenancy_edges.py::"
_AFTER = f"{_edges}test_what_a_caller_binds_for_a_transaction_is_not_bound_after_its_commit_though_verbs_ran_in_it"
_NAMES = "test_tenancy_channels.py::test_channel_names_are_short_lower_case_and_different_for_every_tenant_and_relay"
_RING = "test_tenancy_channels.py::test_a_ring_for_a_foreign_tenant_or_relay_is_refused_whole_and_nothing_rings"
_PREDICATES = "test_sql_predicates.py::test_every_statement_on_a_tenant_table_compares_its_tenant_with_the_bound_one"

_tenancy = partial(Mutant, f"{_F}10_tenancy.sql")
_channels = partial(Mutant, f"{_F}20_channels.sql")


def _without_predicate() -> list[Mutant]:
    """Statements of each room and kind: that test reads them all."""
    return [
        Mutant(f"{_F}{file}", function, "without the tenant", old, new, test=_PREDICATES)
        for file, function, old, new in (
            ("25_dispatch_rows.sql", "renew_jobs", " and q.tenant_id = p_tenant", ""),
            ("31_dispatch_claim.sql", "claim_again", "c.tenant_id = v_tenant and ", ""),
            ("34_dispatch_end.sql", "purge", "d.tenant_id = v_tenant and ", ""),
            ("51_outbox_enqueue.sql", "outbox_last", "o.tenant_id = p_tenant and ", ""),
            ("52_outbox_claim.sql", "outbox_unclaim", "o.tenant_id = v_tenant and ", ""),
            ("70_durable_rows.sql", "durable_renew", " = h.row_id and c.tenant_id = p_tenant", " = h.row_id"),
            ("73_durable_claim.sql", "durable_candidates", "c.tenant_id = v_tenant and c.job_id = b.", "c.job_id = b."),
        )
    ]


MUTANTS = [
    *_without_predicate(),
    # --- binding
    _tenancy(
        "bind_tenant",
        "no tenant is any",
        "      raise exception 'no tenant was given, and none is bound on this connection' using errcode = 'S2001';",
        "      return '';",
        equivalent="row security raises the same, where a row is looked at",
    ),
    _tenancy(
        "bind_tenant",
        "another one than is bound",
        "if v_tenant = '' or v_before not in ('', v_tenant) then",
        "if v_tenant = '' then",
        test="test_tenancy_transactions.py::test_a_tenant_other_than_the_one_that_the_caller_has_bound_is_a_mismatch",
    ),
    _tenancy("bind_tenant", "by anybody's binding", f"where {_OWN}\n    and", "where", test=_REFUSED),
    _tenancy("bind_tenant", "of any tenant", "(b.tenant_id = v_tenant or b.tenant_id is null)", "true", test=_REFUSED),
    _tenancy(
        "bind_tenant",
        "for any relay",
        "(p_relay is null or b.relay_id = p_relay or b.relay_id is null)",
        "true",
        test=_REFUSED,
    ),
    _tenancy("bind_tenant", "for verbs of any kind", "(p_kinds is null or b.kind = any (p_kinds))", "true", test=_KIND),
    _tenancy(
        "set_tenant", "for the session and not for the transaction", "p_tenant, true)", "p_tenant, false)", test=_AFTER
    ),
    _tenancy("unbind_tenant", "it stays bound", "p_before := relay.set_tenant(p_before);", "null;", test=_ENDS),
    _tenancy(
        "login_is",
        "who has one relay has all",
        " and b.relay_id is null)",
        ")",
        test="test_protocol_lease.py::test_a_login_bound_to_one_relay_must_name_it_to_reclaim_or_expire",
    ),
    _tenancy(
        "my_bindings",
        "everybody's",
        f"where {_OWN} order",
        "order",
        test=f"{_bindings}test_the_bindings_that_a_login_can_read_are_its_own",
    ),
    # --- channels
    _channels("channel_name", "one for all tenants", "octet_length(p_tenant) || ':' || p_tenant ||", "", test=_NAMES),
    _channels("channel_name", "one for all relays", " || coalesce(p_relay, '')", "", test=_NAMES),
    _channels(
        "channel_name",
        "known to who knows the names",
        "v_secret || convert_to(",
        "convert_to(",
        test="test_tenancy_channels.py::test_another_installation_has_other_names",
    ),
    _channels(
        "channel", "of any relay", "relay.bind_tenant(p_tenant, p_relay)", "relay.bind_tenant(p_tenant)", test=_REFUSED
    ),
    _channels(
        "channel",
        "results for workers too",
        "if not relay.login_is(array['gateway', 'operator'], v_tenant) then",
        "if false then",
        test="test_tenancy_channels.py::test_a_worker_is_not_told_the_channel_of_results_and_nobody_a_foreign_one",
    ),
    _channels(
        "channel",
        "all tenants' events for who has one",
        " and b.tenant_id is null)",
        ")",
        test=f"{_edges}test_the_channel_of_all_tenants_events_is_told_to_who_has_all_tenants_alone",
    ),
    _channels(
        "ring", "of any relay", "bind_tenant(v_ring.tenant, v_ring.relay)", "bind_tenant(v_ring.tenant)", test=_RING
    ),
    _channels(
        "ring",
        "with any payload",
        "or v_ring.payload !~ '^[0-9a-f]{32}(,[0-9a-f]{32})*\\Z'",
        "",
        test="test_tenancy_channels.py::test_a_payload_is_one_to_two_hundred_job_ids_and_nothing_else",
    ),
    # --- listings, which look across tenants
    Mutant(
        f"{_F}40_sweep_listing.sql",
        "tenants_due",
        "everybody's",
        f"{_OWN} and ",
        "",
        test="test_protocol_sweeps.py::test_the_listing_of_due_tenants_names_only_those_that_the_login_is_bound_to",
    ),
    Mutant(
        f"{_F}40_sweep_listing.sql",
        "tenants_due",
        "for any relay",
        "\n    and (b.relay_id is null or b.relay_id = p_relay)",
        "",
        test="test_protocol_sweeps.py::test_the_listing_of_due_tenants_names_only_those_that_the_login_is_bound_to",
    ),
    Mutant(
        f"{_F}60_outbox_listing.sql",
        "outbox_tenants",
        "everybody's",
        f"{_OWN} and ",
        "",
        test="test_outbox_operate.py::test_a_drainer_of_some_tenants_finds_takes_and_tidies_theirs_alone",
    ),
    Mutant(
        f"{_F}80_durable_listing.sql",
        "durable_tenants",
        "everybody's",
        f"{_OWN} and ",
        "",
        test="test_durable_tenancy.py::test_listings_tell_a_login_of_its_own_tenants_alone",
    ),
    # --- verbs that ask for their relay, or for a kind of login
    Mutant(
        f"{_F}31_dispatch_claim.sql",
        "claim",
        "for a relay that is not the login's",
        "bind_tenant(p_tenants[v_i], p_relay, ",
        "bind_tenant(p_tenants[v_i], null, ",
        test=_REFUSED,
    ),
    Mutant(
        f"{_F}32_dispatch_settle.sql",
        "complete",
        "for a relay that is not the login's",
        "bind_tenant(v_tenants[v_i], p_relay, ",
        "bind_tenant(v_tenants[v_i], null, ",
        test=_REFUSED,
    ),
    Mutant(
        f"{_F}33_dispatch_read.sql",
        "poll",
        "by workers too",
        "{gateway,operator}",
        "{gateway,operator,worker}",
        test=_KIND,
    ),
    Mutant(
        f"{_F}34_dispatch_end.sql",
        "expire_late",
        "of all relays, by a login of one",
        "if p_relay is null and not relay.login_is(array['gateway', 'worker', 'operator'], v_tenant) then",
        "if false then",
        test="test_protocol_lease.py::test_a_login_bound_to_one_relay_must_name_it_to_reclaim_or_expire",
    ),
    Mutant(
        f"{_F}34_dispatch_end.sql",
        "sweep_turn",
        "of any relay",
        "(b.relay_id is null or p_name = split_part(p_name, ':', 1) || ':' || b.relay_id)",
        "true",
        test=f"{_edges}test_a_login_of_one_relay_takes_the_turns_of_that_one_alone",
    ),
    Mutant(
        f"{_F}51_outbox_enqueue.sql",
        "outbox_enqueue",
        "by workers too",
        "bind_tenant(p_tenant, null, '{gateway}')",
        "bind_tenant(p_tenant, null, '{gateway,worker}')",
        test=_KIND,
    ),
    Mutant(
        f"{_F}53_outbox_settle.sql",
        "outbox_settle",
        "by any login of the tenant",
        "bind_tenant(v_tenants[v_i], null, '{gateway}')",
        "bind_tenant(v_tenants[v_i])",
        test=_KIND,
    ),
]

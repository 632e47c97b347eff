"""Mutants of the outbox room's functions. No machine plays it, so each names its test."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_FAST = """
        where o.tenant_id = v_tenant and o.event_id = i.event_id and o.fence = i.fence and o.claimed_by = p_claimed_by
        limit 1 for update) l;
"""
_SLOW = """
      where o.tenant_id = v_tenant and o.event_id = i.event_id and o.fence = i.fence and o.claimed_by = p_claimed_by
      limit 1 for update) l;
"""

_LOCKED = "locked::what_is_locked_is_stepped_over_and_the_rest_is_done"
_CURRENT = "claim::only_the_current_claim_can_be_settled_and_only_once"
_WAITED = "claim::a_settling_that_had_to_wait_for_its_row_is_applied"
_PARKED = "locked::what_a_drainer_says_of_an_event_that_a_person_is_just_parking_is_stale"
_STALE = "claim::a_claim_that_is_too_old_is_taken_back_counts_as_a_failure_and_its_late_settling_changes_nothing"


def _of(file: str, function: str, *mutants: tuple[str, ...]) -> list[Mutant]:
    """Return mutants of a function: of each its name, what is changed, and its test, as file::name in short."""
    found = []
    for name, *changes, test in mutants:
        told_by = "test_outbox_{}.py::test_{}".format(*test.split("::"))
        found.append(Mutant(f"migrations/functions/{file}.sql", function, name, *changes, test=told_by))
    return found


def _settlings() -> list[Mutant]:
    """Outcomes that are all alike, delivered, have a statement of their own."""
    return [
        mutant
        for text, what in ((_FAST, "delivered"), (_SLOW, "any outcome"))
        for name, old, test in (
            ("without the fence", " and o.fence = i.fence", _CURRENT),
            ("without the drainer", " and o.claimed_by = p_claimed_by", _CURRENT),
            ("without a lock", " for update", _PARKED if text is _FAST else _WAITED),
        )
        for mutant in _of("53_outbox_settle", "outbox_settle", (f"{what}, {name}", text, text.replace(old, ""), test))
    ]


MUTANTS = [
    # --- rows
    *_of(
        "50_outbox_rows",
        "outbox_back",
        (
            "it is parked one attempt late",
            "o.attempts + 1 >= p_max_attempts\n                   then 'parked'",
            "o.attempts >= p_max_attempts\n                   then 'parked'",
            "o.attempts + 1 >= p_max_attempts\n                       then p_at",
            "o.attempts >= p_max_attempts\n                       then p_at",
            "claim::a_failure_is_counted_and_kept_and_the_last_one_parks",
        ),
        (
            "a release counts",
            "in ('failed', 'park') then 1",
            "in ('failed', 'park', 'release') then 1",
            "claim::a_claim_whose_reply_was_lost_is_given_back_uncounted",
        ),
        (
            "the error is lost",
            "else i.error end",
            "else o.last_error end",
            "claim::a_failure_is_counted_and_kept_and_the_last_one_parks",
        ),
        (
            "what goes back keeps its fence",
            "fence = o.fence + 1, claimed_by = null",
            "fence = o.fence, claimed_by = null",
            "batches::a_claim_tells_of_each_event_its_own_whatever_others_have",
        ),
    ),
    *_of(
        "50_outbox_rows",
        "outbox_promote",
        (
            "the last of its key first",
            "order by o.seq, o.event_id limit 1) f",
            "order by o.seq desc, o.event_id desc limit 1) f",
            "order::a_keyed_event_waits_for_the_one_before_it_and_others_do_not",
        ),
        ("a locked one is waited for", "for update skip locked", "for update", _LOCKED),
    ),
    # --- enqueue
    *_of(
        "51_outbox_enqueue",
        "outbox_enqueue",
        (
            "behind another of its key it is ready",
            "case when v_last is null then 'ready' else 'waiting' end, v_now",
            "'ready', v_now",
            "edges::an_event_behind_another_of_its_key_is_stored_as_waiting",
        ),
        (
            "its place is the clock's alone",
            "greatest((extract(epoch from v_now) * 1000000)::bigint, v_last + 1)",
            "(extract(epoch from v_now) * 1000000)::bigint",
            "edges::its_place_is_above_the_last_of_its_key_though_the_clock_was_set_back",
        ),
        (
            "nobody is woken",
            "if p_notify and coalesce",
            "if false and coalesce",
            "enqueue::an_event_is_there_at_the_commit_and_not_before_and_so_is_its_wake_up",
        ),
    ),
    # --- claim
    *_of(
        "52_outbox_claim",
        "outbox_claim",
        (
            "a claim waits for locked events",
            "limit v_quota for update skip locked",
            "limit v_quota for update",
            _LOCKED,
        ),
        (
            "in the order of ids",
            "order by o.available_at, o.seq, o.event_id limit v_quota",
            "order by o.event_id limit v_quota",
            "edges::a_claim_takes_what_has_been_due_for_longest_whenever_it_was_written",
        ),
        (
            "before they are due",
            "o.available_at > v_after\n              and o.available_at <= v_now",
            "o.available_at > v_after",
            "claim::a_delayed_event_is_due_when_it_is_due",
        ),
        ("the cursor is ignored", " and o.available_at > v_after", "", "claim::a_cursor_leaves_out_what_lies_below_it"),
        (
            "the limit is every group's",
            "v_left := v_left - v_got;",
            "",
            "claim::groups_take_turns_whatever_the_backlog_of_one",
        ),
        (
            "the first group takes all",
            "least(greatest(1, p_limit / v_groups), v_left)",
            "v_left",
            "claim::groups_take_turns_whatever_the_backlog_of_one",
        ),
        ("of every kind", "o.kind = v_kind and ", "", "edges::a_claim_takes_events_of_its_kinds_alone"),
        (
            "the fence stays",
            "fence = o.fence + 1,",
            "fence = o.fence,",
            "batches::a_claim_tells_of_each_event_its_own_whatever_others_have",
        ),
        (
            "each claim is the first",
            "coalesce(o.first_claimed_at, v_now)",
            "v_now",
            "edges::how_long_ago_an_event_was_first_tried_counts_from_its_first_claim_and_no_later_one",
        ),
        (
            "whatever their size",
            " or v_size > v_room",
            "",
            "claim::a_claim_is_bounded_by_bytes_but_for_its_first_event",
        ),
    ),
    *_of(
        "52_outbox_claim",
        "outbox_choose",
        (
            "suspect ones among others",
            "elsif v_suspect[v_n] then",
            "elsif false then",
            "claim::a_suspect_event_is_claimed_alone_until_its_claim_is_answered_for",
        ),
        (
            "beside a claimed one of its key",
            " or 'claimed' = any (v_states)",
            "",
            "order::one_that_comes_before_one_on_its_way_waits_until_that_has_ended",
        ),
        (
            "who stands before it is not locked",
            "limit 1 for key share skip locked) l;",
            "limit 1) l;",
            "order::whoever_ends_a_leader_waits_for_a_claim_that_makes_a_follower_wait_and_then_sees_it",
        ),
        (
            "who stands before it is waited for",
            "for key share skip locked",
            "for key share",
            "order::a_claim_leaves_a_follower_alone_whose_leader_is_being_settled_at_this_moment",
        ),
    ),
    *_of(
        "52_outbox_claim",
        "outbox_unclaim",
        (
            "of any drainer",
            " and o.claimed_by = p_claimed_by",
            "",
            "claim::a_claim_whose_reply_was_lost_is_given_back_uncounted",
        ),
        ("locked ones are waited for", "for update skip locked", "for update", _LOCKED),
    ),
    *_of(
        "52_outbox_claim",
        "outbox_due",
        ("claims of any age are taken back", " and o.claimed_at < v_until", "", _STALE),
        ("locked claims are waited for", "for update skip locked", "for update", _LOCKED),
        (
            "a lost claim counts nothing",
            "array_fill('failed'::text, array[v_count::int])",
            "array_fill('release'::text, array[v_count::int])",
            _STALE,
        ),
        (
            "a lost claim is not suspect",
            "p_max_attempts, true) b;",
            "p_max_attempts, false) b;",
            "claim::a_suspect_event_is_claimed_alone_until_its_claim_is_answered_for",
        ),
        (
            "no lost turn is looked for",
            "if v_look > 0 then",
            "if false then",
            "order::a_turn_that_was_lost_to_a_writer_who_committed_beside_the_settling_is_found",
        ),
    ),
    # --- what drainers say
    *_settlings(),
    *_of(
        "53_outbox_settle",
        "outbox_settle",
        (
            "the next of a key is left waiting",
            "        if v_keys is not null then\n          select",
            "        if false then\n          select",
            "order::a_keyed_event_waits_for_the_one_before_it_and_others_do_not",
        ),
    ),
    # --- what people say
    *_of(
        "54_outbox_operate",
        "outbox_purge",
        (
            "the youngest first",
            "order by o.parked_at limit p_limit",
            "order by o.parked_at desc limit p_limit",
            "operate::purge_removes_parked_events_alone_the_oldest_first",
        ),
        (
            "without a limit",
            "order by o.parked_at limit p_limit for",
            "order by o.parked_at for",
            "operate::purge_removes_parked_events_alone_the_oldest_first",
        ),
        ("locked ones are waited for", "for update skip locked", "for update", _LOCKED),
    ),
    *_of(
        "54_outbox_operate",
        "outbox_retry_parked",
        (
            "the youngest first",
            "order by o.parked_at limit p_limit",
            "order by o.parked_at desc limit p_limit",
            "operate::parked_events_begin_anew_by_what_they_have_in_common_some_at_a_time_the_oldest_first",
        ),
        ("locked ones are waited for", "for update skip locked", "for update", _LOCKED),
    ),
    *_of(
        "54_outbox_operate",
        "outbox_retry",
        (
            "without a lock",
            "limit 1 for update) l",
            "limit 1) l",
            "locked::of_two_who_retry_a_parked_event_the_one_that_waited_is_told_that_there_was_nothing_to_do",
        ),
    ),
    *_of(
        "54_outbox_operate",
        "outbox_park",
        (
            "without a lock",
            "limit 1 for update) l",
            "limit 1) l",
            "locked::who_parks_an_event_waits_for_what_is_being_said_of_it_and_parks_it_then",
        ),
        (
            "one that is parked is parked again",
            "where l.state <> 'parked'",
            "where true",
            "operate::park_gives_up_any_event_also_one_on_its_way_whose_drainer_is_then_too_late",
        ),
        (
            "the next of its key is left waiting",
            "if v_keys is not null then",
            "if false then",
            "operate::park_gives_up_any_event_also_one_on_its_way_whose_drainer_is_then_too_late",
        ),
    ),
]

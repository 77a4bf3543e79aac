"""What the product never calls, and the one place that opens files which others may have made."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("ampacity", "analysis", "loadgen", "reports", "simulator", "workloads")
FORBIDDEN = {
    *("eval", "exec", "compile", "__import__", "execfile"),
    *("pickle.load", "pickle.loads", "marshal.loads", "marshal.load", "shelve.open"),
    *("yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "yaml.UnsafeLoader"),
    *("pd.read_pickle", "os.system", "os.popen", "tempfile.mktemp", "Markup"),
    "ssl._create_unverified_context",
}
OPENING = {"open", "read_text", "read_bytes", "OSFile", "memory_map", "ParquetFile", "read_table"}
ALLOWED = {  # files that may call what others may not, and why
    "ampacity/files.py": "the one place",
    "ampacity/cli/output.py": "writes what the user named",
    "ampacity/cli/streams.py": "/dev/null",
    "ampacity/process.py": "/proc",
    "loadgen/audit.py": "/proc",
    "loadgen/host.py": "/proc and /dev/null",
    "loadgen/rundir/files.py": "writes, and Arrow reads by a path that open_file has seen",
    "loadgen/rundir/parquet.py": "by a path that open_file has seen",
    "loadgen/rundir/write.py": "writes, and goes on with streams that open_file has seen",
    "reports/charts/svg.py": "its own script",
    "reports/pages/page.py": "its own templates",
    "workloads/archetypes.py": "its own data",
    "workloads/prompts/synthetic.py": "its own words",
    "workloads/prompts/tokenizers.py": "its own vocabulary",
    "workloads/traces/columns.py": "its own data",
    "workloads/traces/spans.py": "its own data",
    "workloads/traces/parquet_rows.py": "an open file",
}


def modules() -> list[Path]:
    found = [path for name in FOLDERS for path in (ROOT / name).rglob("*.py")]
    return sorted({path.resolve() for path in found})


def name_of(node: ast.expr) -> str:
    """Return ``a.b`` of a name or an attribute of one; of another attribute its last part."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        whole = isinstance(node.value, ast.Name)
        return f"{name_of(node.value)}.{node.attr}" if whole else f"?.{node.attr}"
    return ""


def findings(path: Path, text: str) -> Iterator[str]:
    """Yield what a module must not do."""
    where = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
    for node in ast.walk(ast.parse(text)):
        at = f"{where}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import | ast.ImportFrom):
            named = [*(alias.name for alias in node.names), getattr(node, "module", "") or ""]
            for module in {"pickle", "marshal", "shelve", "dill"} & set(named):
                yield f"{at} imports {module}"
        unsafe = isinstance(node, ast.Attribute) and node.attr == "CERT_NONE"
        if unsafe and where != "loadgen/send/endpoint.py":
            yield f"{at} trusts anyone"
        if not isinstance(node, ast.Call):
            continue
        name = name_of(node.func)
        given = {k.arg: ast.unparse(k.value) for k in node.keywords}
        if name in FORBIDDEN:
            yield f"{at} calls {name}"
        if name == "yaml.load" and given.get("Loader") != "PlainYaml":
            yield f"{at} loads YAML that may make objects"
        if given.get("shell") == "True" and where != "loadgen/send/keys.py":
            yield f"{at} runs a shell"
        if "allow_pickle" in given:
            yield f"{at} allows pickle"
        if name.endswith("Environment") and "jinja" in text and "autoescape" not in given:
            yield f"{at} makes templates that do not escape"
        opens = name.rpartition(".")[2] in OPENING and name not in ("opener.open", "pa.memory_map")
        opens &= not name.startswith(("os.", "webbrowser"))
        opens &= name.rpartition(".")[2] != name or name in ("open", "ParquetFile")
        modes = [a.value for a in node.args if isinstance(a, ast.Constant)]
        opens &= not {"w", "wb", "ab", "r+b"} & set(map(str, modes))  # what it writes is its own
        if opens and where not in ALLOWED:
            yield f"{at} opens a file by {name}: use ampacity/files.py"


def test_no_module_calls_what_executes_files_or_opens_them_by_itself() -> None:
    found = [line for path in modules() for line in findings(path, path.read_text())]
    assert found == []


def test_every_exception_is_one() -> None:
    """A file that needs no exception any more is not in the list."""
    used = {str(path.relative_to(ROOT)) for path in modules()}
    assert set(ALLOWED) <= used


@pytest.mark.parametrize(
    "line",
    [
        "eval('1')",
        "import pickle",
        "from pickle import loads",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.full_load(text)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run(x, shell=True)",
        "open(path)",
        "path.read_text()",
        "Path(name).open()",
        "context.verify_mode = ssl.CERT_NONE",
        "jinja2.Environment(loader=x)",
    ],
)
def test_each_is_found(line: str) -> None:
    assert list(findings(ROOT / "ampacity" / "new.py", line)), line

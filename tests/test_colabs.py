"""The notebooks run from top to bottom in a checkout, and are committed without outputs."""

import os
from pathlib import Path

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "colabs").glob("*.ipynb"))
MAX_SECONDS = 240  # for one cell

# What a notebook must have shown, by mime type: pieces of its text, or just that there is some.
SHOWN = {
    "quickstart": {
        "text/plain": ["tokens equal: True", "speed-up at ", "round 4: ", "drafts accepted"],
        "text/html": [
            "accepted draft</span>",
            "corrected by full attention</span>",
            '</span><span style="background: rgba(46, 160, 67, 0.25)">',  # an accepted draft
        ],
        "image/png": [""],
    }
}


def outputs(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [out for cell in notebook.cells for out in cell.get("outputs", [])]


def shown(notebook: nbformat.NotebookNode) -> dict[str, str]:
    """All that the notebook shows, joined, by mime type; streams count as plain text."""
    texts: dict[str, str] = {}
    for out in outputs(notebook):
        data = {"text/plain": out.text} if out.output_type == "stream" else out.get("data", {})
        for mime, text in data.items():
            texts[mime] = texts.get(mime, "") + text
    return texts


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_and_show_what_they_promise(path):
    notebook = nbformat.read(path, as_version=4)
    places = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(places), "JAX_PLATFORMS": "cpu"}
    env.pop("MPLBACKEND", None)  # the kernel's own draws into the notebook
    client = nbclient.NotebookClient(
        notebook,
        timeout=MAX_SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
    )
    client.execute(env=env)  # raises at the first cell that fails
    assert all(out.output_type != "error" for out in outputs(notebook))
    texts = shown(notebook)
    for mime, pieces in SHOWN[path.stem].items():
        for piece in pieces:
            assert piece in texts[mime]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_committed_clean(path):
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert notebook.metadata.kernelspec.name == "python3"
    assert not outputs(notebook)
    assert all(c.execution_count is None for c in notebook.cells if c.cell_type == "code")

"""The examples of docs/layouts.md run as they stand, one after the other."""

from helpers import doc_examples


def test_every_example_runs() -> None:
    names = doc_examples.run("layouts.md")

    assert {"verl_packed", "verl_padded", "skyrl_packed", "skyrl_padded"} <= names.keys()
    assert {"megatron_padded", "megatron_fp8"} <= names.keys()

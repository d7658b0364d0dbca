"""Groups are chosen by names of files; what is no such name, and a file that cannot be chosen, are told in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from prorl_hpc.bench.scaling import read_words
from prorl_hpc.cli.composition import compose_all
from prorl_hpc.cli.composition_choices import groups
from prorl_hpc.cli.launch_help import first_comment
from prorl_hpc.messages.errors import ConfigError

GLOBAL = "# @package _global_\n"


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the user's own groups; there is none yet."""
    monkeypatch.delenv("PRORL_CONF_DIR", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "prorl_hpc" / "conf"


def told(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compose_all(list(words))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def latency(own: Path, name: str, content: bytes) -> Path:
    file = own / "latency" / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


@pytest.mark.parametrize("value", ["1", "1.5", "inf", "nan", "true", "null", "[a]", "{a: 1}"])
def test_no_group_is_chosen_by_what_is_no_name(value: str) -> None:
    for group in groups():
        assert f"{group} is a group, chosen by name" in told(f"{group}={value}")


def test_an_optional_group_is_left_out_to_choose_nothing() -> None:
    assert told("bench=null").endswith("but null; leave it out to choose none")
    assert "leave it out" not in told("trainer=null")


def test_a_sweep_over_numbers_is_refused_too() -> None:
    assert "This is no name to YAML, but a number" in told("--multirun", "trainer=grpo,1")
    assert "This is no name to YAML, but a number" in told("--multirun", "trainer=range(1,3)")
    assert len(compose_all(["--multirun", "trainer=glob(g*)"])) == 2


def test_a_file_with_such_a_name_is_to_be_renamed(own: Path) -> None:
    file = latency(own, "inf", f"{GLOBAL}engine: {{kind: scripted}}\n".encode())
    assert f"give {file} another name to choose it" in told("latency=inf")


def test_a_latency_model_that_there_is_not_says_how_to_make_one(own: Path) -> None:
    made = f"`prorl-hpc bench fit RUN --name NAME` makes one, {own}/latency/NAME.yaml"
    assert "smollm2-2cores" in told("latency=nonexist") and made in told("latency=nonexist")
    assert read_words(["latency=nonexist"]).overrides == ["latency=nonexist"]
    latency(own, "mine", f"{GLOBAL}engine: {{kind: scripted}}\n".encode())
    said = told("latency=mins")
    assert "did you mean latency=mine?" in said and made in said


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x93\xff\x00 abc", " is not YAML, which is text in UTF-8: invalid start byte"),
        (b"# @package _global_\na: \x00\n", " is not YAML, which is text in UTF-8: special characters are not allowed"),
        (b"", " needs a first line `# @package _global_`"),
        (b"engine: {kind: scripted}\n", "hold settings of the whole configuration; it has no such line"),
        (b"# @package _globl_\nengine: {kind: scripted}\n", "; it has `# @package _globl_`"),
        (b"# @package _global_\n# cut off here\n", " holds no settings: latency=mine would change nothing"),
    ],
)
def test_a_file_that_cannot_be_chosen_says_where_it_lies_and_what_it_lacks(
    own: Path, content: bytes, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    file = latency(own, "mine", content)
    said = told("latency=mine")
    assert said.startswith(str(file)) and words in said
    assert capfd.readouterr().err == ""


def test_a_file_that_is_not_chosen_stops_nobody(own: Path) -> None:
    latency(own, "binary", b"\x93\xff\x00 abc")
    assert compose_all(["trainer.steps=1"])[0].config.trainer.steps == 1
    assert first_comment(own / "latency" / "binary.yaml") == ""

"""Files that an interrupted run wrote twice, half, or not at all."""

from __future__ import annotations

from pathlib import Path

from launcher.proof.files import FileFacts, compare_files, find_left, read_files

LOG = "epoch,loss\n0,2.5\n1,2.0\n"


def make(folder: Path, **texts: str) -> dict[str, FileFacts]:
    folder.mkdir()
    for name, text in texts.items():
        (folder / name.replace("__", ".")).write_text(text)
    return read_files(folder)


def test_equal_files_have_no_flaw_and_numbers_may_differ(tmp_path: Path) -> None:
    first = make(tmp_path / "1", log__csv=LOG, model__h5="x" * 100)
    found = make(tmp_path / "2", log__csv=LOG.replace("2.5", "2.7"), model__h5="y" * 99)
    assert list(compare_files(first, first, found)) == []


def test_rows_that_appear_twice_are_named_with_the_first_one(tmp_path: Path) -> None:
    first = make(tmp_path / "1", log__csv=LOG)
    [flaw] = compare_files(first, first, make(tmp_path / "2", log__csv=f"{LOG}1,1.9\n"))
    assert (flaw.reference, flaw.message) == ("file-twice", "log.csv has 1 line more than once, such as '1'")


def test_half_files_and_missing_files_are_named(tmp_path: Path) -> None:
    first = make(tmp_path / "1", a__h5="x" * 100, b__h5="x")
    flaws = [*compare_files(first, first, make(tmp_path / "2", a__h5="x" * 50))]
    assert [(flaw.reference, flaw.message) for flaw in flaws] == [
        ("file-lost", "b.h5 is missing"),
        ("half-file", "a.h5 is only half written"),
    ]


def test_rows_that_a_file_begun_again_lacks_are_named(tmp_path: Path) -> None:
    first = make(tmp_path / "1", log__csv=LOG)
    [flaw] = compare_files(first, first, make(tmp_path / "2", log__csv="epoch,loss\n1,2.0\n"))
    assert (flaw.reference, flaw.message) == ("file-lost", "log.csv lacks 1 line, such as '0'")


def test_texts_that_differ_from_run_to_run_are_not_compared(tmp_path: Path) -> None:
    first, second = make(tmp_path / "1", log__txt="at 12:01\n"), make(tmp_path / "2", log__txt="at 12:02\n")
    assert list(compare_files(first, second, make(tmp_path / "3", log__txt="at 12:03\n"))) == []


def test_files_that_only_the_interrupted_run_has_are_a_note_unless_each_run_names_its_files_anew(
    tmp_path: Path,
) -> None:
    first, second = make(tmp_path / "1", a="1"), make(tmp_path / "2", b="1")
    found = make(tmp_path / "3", a="1", c="1")
    assert find_left(first, first, found) == "c is left behind"
    assert find_left(first, second, found) == ""

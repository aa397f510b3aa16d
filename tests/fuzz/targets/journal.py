"""The journal of an interrupted calibration or evaluation: each input is read as both."""

from functools import partial

from fastcar_compile.errors import InputError
from fastcar_compile.tune.journal import Journal, is_measurement, is_row
from fuzz.expect import accepted, as_file, folder, same

_FORMS = (
    ("calibration", "measurements", partial(is_measurement, layers=2)),
    ("evaluation", "rows", is_row),
)


def run(data: bytes) -> bool:
    """Read the bytes as every journal; one that is accepted is written again."""
    path, again = as_file("journal.json", data), folder() / "again.json"
    found = [accepted(InputError, lambda form=form: Journal(path, "key", *form)) for form in _FORMS]
    for book, form in zip(found, _FORMS, strict=True):
        if book is not None and book.entries:
            again.unlink(missing_ok=True)
            name, entry = next(iter(book.entries.items()))
            written = Journal(again, "key", *form)
            written.entries |= book.entries
            written.add(name, entry)
            same(Journal(again, "key", *form).entries, book.entries, "the journal that is written again")
    return any(book is not None for book in found)

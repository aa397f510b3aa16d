"""One visitor: a thread with a game of its own, which takes messages and sends frames."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Condition
from time import monotonic, perf_counter
from typing import Literal

from fastcar_compile.errors import InputError, UserError
from fastcar_play.game import Beginning, Game, Mode, Moment, Stage, View
from fastcar_play.messages import (
    Drawn,
    Ended,
    FrameHeader,
    Keys,
    Limit,
    Record,
    RecordingHeader,
    Request,
    Restart,
    Run,
    SetMode,
    SetThreshold,
    SideHeader,
    Status,
    Visible,
    packed,
)
from fastcar_play.pace import Pace
from fastcar_play.recording import Recording, png

AWAY_SECONDS = 300.0
"""Without a key or another choice of the player, the game is paused."""

GONE_SECONDS = 1200.0
"""Without a key or another choice of the player, the game ends, and its place is free."""

WAITING = 512
"""Messages of a page that may wait for the game."""

LOOK_SECONDS = 0.05
"""Between looks whether a page has read what was sent."""

_log = logging.getLogger(__name__)


class Visit:
    """A visitor's game. `run` is its thread; `post` and `stop` are called by others.

    Args:
        send: takes messages for the page, from this thread.
        congested: the page does not read what was sent; the game waits for it.
    """

    def __init__(self, stage: Stage, send: Callable[[str | bytes], None], congested: Callable[[], bool]) -> None:
        self._stage, self._send, self._congested = stage, send, congested
        self._changed = Condition()
        self._inbox: list[Request] = []
        self._stopped = False
        self._pace = Pace(stage.world.file.frames_per_second)
        self._held: frozenset[str] = frozenset()
        self._pressed: frozenset[str] = frozenset()
        self._recording: Recording | None = None
        self._note, self._stale = "", True
        self._touched = monotonic()

    def post(self, request: Request) -> bool:
        """Hand over a message of the page; False: too many wait already."""
        with self._changed:
            self._inbox.append(request)
            self._changed.notify()
            return len(self._inbox) <= WAITING

    def stop(self) -> None:
        """End the game after its current frame."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def run(self) -> None:
        """Play until `stop`; tell the page why, if it is for another reason."""
        try:
            with _closed(self._stage) as game:
                self._play(game)
        except UserError as error:
            self._send(Ended(reason=str(error)).model_dump_json())
        except Exception:  # the last line of a thread: the server goes on, and the page says that this game does not
            _log.exception("a game has ended with an internal error")
            self._send(Ended(reason="internal error; the server's terminal has the details").model_dump_json())

    def _play(self, game: Game) -> None:
        self._show(game.first())
        self._tell(game)
        while (requests := self._next()) is not None:
            for request in requests:
                if not self._until_read():  # each may be answered by a frame
                    return
                self._handle(game, request)
            self._rest()
            if self._stale:
                self._tell(game)
            if self._pace.wait(monotonic()) == 0:
                self._frame(game)

    def _next(self) -> list[Request] | None:
        """Wait for messages, or until the next frame is due; None: the end."""
        with self._changed:
            while not self._stopped and not self._inbox:
                seconds = self._pace.wait(monotonic())
                left = self._touched + (AWAY_SECONDS if self._pace.going else GONE_SECONDS) - monotonic()
                if seconds == 0 or left <= 0:
                    break
                self._changed.wait(left if seconds is None else min(seconds, left))
            found, self._inbox = self._inbox, []
            return None if self._stopped else found

    def _until_read(self) -> bool:
        """Wait while too much of what was sent is unread; return False where the game ends meanwhile.

        The page's messages pile up then, until `post` refuses them.
        """
        with self._changed:
            while self._congested() and not self._stopped:
                self._changed.wait(LOOK_SECONDS)
            return not self._stopped

    def _rest(self) -> None:
        """Pause, and later end, a game that nobody plays.

        Raises:
            InputError: nobody has played for long.
        """
        quiet = monotonic() - self._touched
        if quiet >= GONE_SECONDS:
            raise InputError("nobody has played for long, so the place was given back", hint="load the page again")
        if quiet >= AWAY_SECONDS and self._pace.going:
            self._run(False)
            self._note = "Paused: no key was pressed for some minutes."

    def _handle(self, game: Game, request: Request) -> None:
        if isinstance(request, Drawn):
            self._pace.drawn(request.serial)
            return
        self._touched = monotonic()
        try:
            match request:
                case Keys():
                    held = frozenset(request.held)
                    self._pressed |= held - self._held  # a short press between two frames counts
                    self._held = held
                    return
                case Run():
                    self._run(request.value)
                case Visible():
                    self._pace.visible = request.value
                    self._pace.paused()
                case Limit():
                    self._pace.limited = request.value
                    self._pace.paused()
                case Record():
                    self._record(request.value)
                case _:
                    self._change(game, request)
            self._note = ""
        except UserError as error:
            self._note = error.what
        self._stale = True

    def _run(self, value: bool) -> None:
        self._pace.running, self._stale = value, True
        self._pace.paused()

    def _change(self, game: Game, request: SetMode | SetThreshold | Restart) -> None:
        """Change the game itself."""
        match request:
            case SetMode():
                game.set_mode(request.value)
            case SetThreshold():
                compiled = self._stage.replay.compiled
                game.set_threshold(list(compiled or ()) if request.value == "compiled" else request.value)
            case Restart():
                game.begin(request.beginning())
        if not isinstance(request, SetThreshold):
            self._pace.paused()
            self._show(game.first())

    def _frame(self, game: Game) -> None:
        self._pace.begun(monotonic())
        moment = game.advance(self._held | self._pressed)
        self._pressed = frozenset()
        if self._recording is not None:
            self._recording.add([view.picture for view in moment.views], monotonic())
        self._show(moment)
        if self._recording is not None and self._recording.full:
            self._record(False)
            self._note, self._stale = "The recording was full, and has been saved.", True
        game.settle()

    def _show(self, moment: Moment) -> None:
        start = perf_counter()
        pictures = [png(view.picture) for view in moment.views]
        seconds = perf_counter() - start
        sides = tuple(_side(view, len(data)) for view, data in zip(moment.views, pictures, strict=True))
        fps = self._pace.made(monotonic())
        header = FrameHeader(
            serial=self._pace.sent,
            number=moment.number,
            action=moment.action,
            fps=fps,
            pixels_ms=moment.pixel_seconds * 1000,
            png_ms=seconds * 1000,
            refilled=any(view.step is not None and view.step.refilled for view in moment.views),
            recorded=self._recorded,
            sides=sides,
        )
        self._send(packed(header, pictures))

    @property
    def _recorded(self) -> int | None:
        return None if self._recording is None else len(self._recording)

    def _record(self, value: bool) -> None:
        """Begin a recording, or end it and send it.

        Raises:
            InputError: there is nothing to send.
        """
        recording, self._recording = self._recording, Recording(self._stage.world.file.image) if value else None
        if value or recording is None:
            return
        if not len(recording):
            raise InputError("nothing was recorded: the game was paused")
        header = RecordingHeader(name="game.gif", frames=len(recording))
        self._send(packed(header, [recording.gif()]))
        self._pace.paused()

    def _tell(self, game: Game) -> None:
        self._stale = False
        beginning: Beginning = game.beginning
        status = Status(
            running=self._pace.running,
            mode=Mode(game.mode),
            threshold=_shown(game),
            start=beginning.start,
            seed=beginning.seed,
            temperature=beginning.temperature,
            top_k=beginning.top_k,
            limited=self._pace.limited,
            recorded=self._recorded,
            note=self._note,
        )
        self._send(status.model_dump_json())


@contextmanager
def _closed(stage: Stage) -> Iterator[Game]:
    """Yield a game, and give back its sessions at the end."""
    game = Game(stage)
    try:
        yield game
    finally:
        game.close()


def _shown(game: Game) -> float | Literal["compiled"] | None:
    threshold = game.threshold
    return "compiled" if isinstance(threshold, list) else threshold


def _side(view: View, size: int) -> SideHeader:
    step, codes = view.step, tuple(view.codes.tolist())
    if step is None:
        return SideHeader(
            side=view.side, bytes=size, token_ms=None, sampling_ms=None, codes=codes, replayed=(), by_layer=()
        )
    return SideHeader(
        side=view.side,
        bytes=size,
        codes=codes,
        token_ms=step.seconds / step.forwards * 1000,
        sampling_ms=step.sampling * 1000,
        replayed=tuple(round(100 * float(share)) for share in step.decisions.mean(1)),
        by_layer=tuple(float(share) for share in step.decisions.mean(0)),
    )

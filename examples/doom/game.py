"""Record ViZDoom episodes that a scripted agent plays: frames, actions, and what kind of motion each frame shows."""

from collections.abc import Generator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import vizdoom
from PIL import Image
from vizdoom import Button, DoomGame, GameVariable, Mode, ScreenFormat, ScreenResolution
from world_format import ACTIONS, SIZE, Action

TRAINING = ("health_gathering_supreme", "my_way_home", "deadly_corridor", "defend_the_line", "deathmatch")
HELD_OUT = "health_gathering"
"""A scenario that no training episode shows: one room, and a wall texture of its own."""

TICS = 3
"""Game tics per frame. The game has 35 tics per second."""

WARM_UP_TICS = 14
"""Tics until the weapon has been raised."""

KINDS = ("still", "turning", "walking", "shooting")
"""What a frame shows against the frame before. A turn moves every pixel, so turning while walking is `turning`."""

STILL, TURNING, WALKING, SHOOTING = range(4)

_TURN_DEGREES = 10.0 / TICS
_STEP, _ANGLE = 1.0, 0.5
"""Map units and degrees that count as motion."""

_BLOCKED = 6.0
"""Map units per frame: a walk of the agent that is slower than this has met a wall."""

_CONTROLS = {
    "forward": Button.MOVE_FORWARD,
    "back": Button.MOVE_BACKWARD,
    "strafe_left": Button.MOVE_LEFT,
    "strafe_right": Button.MOVE_RIGHT,
    "fire": Button.ATTACK,
}
_BUTTONS = [*_CONTROLS.values(), Button.TURN_LEFT_RIGHT_DELTA]
_POSE = [GameVariable.POSITION_X, GameVariable.POSITION_Y, GameVariable.ANGLE]


@dataclass(frozen=True)
class Episode:
    """One episode.

    Attributes:
        frames: uint8 [T, 64, 64, 3], RGB.
        actions: uint8 [T], index into ACTIONS of the action that led to each frame; frame 0 has "still".
        kinds: uint8 [T], index into KINDS; frame 0 is STILL.
    """

    scenario: str
    seed: int
    frames: np.ndarray
    actions: np.ndarray
    kinds: np.ndarray


def button_values(action: Action) -> list[float]:
    """Return one value per game button for an action."""
    held = set(action.buttons)
    turn = ("right" in held) - ("left" in held)
    return [float(name in held) for name in _CONTROLS] + [turn * _TURN_DEGREES]


class Agent:
    """A player that holds an action for some frames, then picks another. It turns away when a wall stops it."""

    _WEIGHTS = np.array([0.14, 0.10, 0.10, 0.30, 0.09, 0.09, 0.04, 0.04, 0.04, 0.06])
    _FRAMES = ((4, 14), (3, 14), (3, 14), (6, 24), (3, 12), (3, 12), (3, 9), (3, 9), (3, 9), (4, 12))
    _TURNS = (1, 2)

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng, self._action, self._left = rng, 0, 0

    def choose(self, blocked: bool) -> int:
        """Return the index of the next frame's action."""
        if blocked and "forward" in ACTIONS[self._action].buttons:
            self._begin(int(self._rng.choice(self._TURNS)))
            self._left += self._rng.integers(0, 6)
        elif self._left == 0:
            self._begin(int(self._rng.choice(len(ACTIONS), p=self._WEIGHTS)))
        self._left -= 1
        return self._action

    def _begin(self, action: int) -> None:
        shortest, longest = self._FRAMES[action]
        self._action, self._left = action, int(self._rng.integers(shortest, longest + 1))


def open_game(scenario: str) -> DoomGame:
    """Return a headless game of a scenario in its easiest skill, without HUD, messages and screen flashes."""
    game = DoomGame()
    game.load_config(str(Path(vizdoom.scenarios_path) / f"{scenario}.cfg"))
    game.set_window_visible(False)
    game.set_sound_enabled(False)
    game.set_mode(Mode.PLAYER)
    game.set_screen_format(ScreenFormat.RGB24)
    game.set_screen_resolution(ScreenResolution.RES_320X240)
    game.set_available_buttons(_BUTTONS)
    game.set_available_game_variables(_POSE)
    game.set_doom_skill(1)
    game.set_episode_start_time(WARM_UP_TICS)
    game.set_render_hud(False)
    game.set_render_crosshair(False)
    game.set_render_weapon(True)
    game.set_render_screen_flashes(False)
    game.set_render_messages(False)
    game.add_game_args("+sv_infiniteammo 1")
    return game


def picture(screen: np.ndarray) -> np.ndarray:
    """Return a screen uint8 [240, 320, 3] averaged to uint8 [64, 64, 3]. The sides are 4:3 before and 1:1 after."""
    return np.asarray(Image.fromarray(screen).resize((SIZE, SIZE), Image.Resampling.BOX))


def kind_of(before: np.ndarray, after: np.ndarray, action: Action) -> int:
    """Return the kind of motion between two poses float64 [3]: x, y in map units, angle in degrees."""
    turned = abs((after[2] - before[2] + 180.0) % 360.0 - 180.0)
    if turned > _ANGLE:
        return TURNING
    if np.hypot(*(after[:2] - before[:2])) > _STEP:
        return WALKING
    return SHOOTING if "fire" in action.buttons else STILL


def record(game: DoomGame, scenario: str, seed: int, longest: int) -> Episode:
    """Return one episode of at most `longest` frames. Same scenario and seed, same frames."""
    game.set_seed(seed % 2**32)
    game.new_episode()
    agent = Agent(np.random.default_rng(seed))
    frames, actions, kinds = [], [0], [STILL]
    state = game.get_state()
    pose = np.array(state.game_variables)
    frames.append(picture(state.screen_buffer))
    blocked = False
    while len(frames) < longest:
        action = agent.choose(blocked)
        game.make_action(button_values(ACTIONS[action]), TICS)
        if game.is_episode_finished():
            break
        state = game.get_state()
        after = np.array(state.game_variables)
        kinds.append(kind_of(pose, after, ACTIONS[action]))
        blocked = np.hypot(*(after[:2] - pose[:2])) < _BLOCKED and action == actions[-1]
        pose = after
        frames.append(picture(state.screen_buffer))
        actions.append(action)
    return Episode(scenario, seed, np.stack(frames), np.array(actions, np.uint8), np.array(kinds, np.uint8))


def episodes(scenario: str, first_seed: int, longest: int) -> Generator[Episode]:
    """Yield episodes with seeds `first_seed`, `first_seed + 1`, … without end. The game closes with the iterator."""
    game = open_game(scenario)
    game.set_episode_timeout(WARM_UP_TICS + (longest + 1) * TICS)
    with TemporaryDirectory() as scratch:
        game.set_doom_config_path(str(Path(scratch) / "settings.ini"))  # else it writes into the current folder
        game.init()
        try:
            for seed in count(first_seed):
                yield record(game, scenario, seed, longest)
        finally:
            game.close()

"""The prose of docs/measurements/doom.md. Numbers stand in braces; `document.py` computes them."""

HEAD = """# The game decoder

This page measures what replay costs the decoder of `examples/doom` in quality. Its
videos are real camera motion, not drawn shapes. `python benchmarks/doom_quality.py docs` writes the page; do not edit
it by hand. [Drafts](../explanation/drafts.md#what-it-gives) are measured on the same sequences.

A sequence has {frames} frames of held-out play. The first {prompt} are a prompt. The other {decoded} are decoded, each
token from the true past (teacher-forced). Figures are of the last {measured} frames, because the first decoded frame
has no frame to replay. There are {held_out} sequences of each of the three maps that the decoder was trained on (*seen
maps*), and {unseen} of a map that neither decoder nor gate nor threshold has seen (*unseen map*). They are evenly
spaced, but one of {rich} was chosen because it shows shooting, which is rare. So figures of all frames are means of the
kinds of motion, each with its share of all recorded play. With so few sequences, a few points of replay mean nothing.

- A frame is an action token and {image} image tokens. The action is given, so it counts neither in the NLL nor in the
  agreement. Its forward may replay like any other, and counts in *replay*.
- *replay*: share of the eligible forwards (t >= F) whose MLP is replayed, over all layers.
- *cost*: NLL per image token with replay, over the NLL of the same decoder without replay.
- *trained*: the decoder as it was trained. *tuned*: fine-tuned together with its gate `learned`, in only {tuned} steps
  of {batch} sequences of {train_frames} frames, at a rate of {rate:g}, for {tuned_target} replay. It is not shipped.
  It has one threshold for all layers, as the gate was trained.
- `tas, mean of heads` is the paper's gate. `tas, trained heads` has a trained weight per query head ({tas} steps).
  `learned` is a trained network ({learned} steps). Both were trained for {gate_target} replay. `random` replays by a
  hash, so its figures are the result of chance.
- Thresholds of the trained decoder come from {calibration} other sequences of each seen map: along the layers' own loss
  curves (`learned`: one for all layers), and the most replay within {low:.2f}x and {high:.2f}x of the dense NLL there.
"""

ANSWER = """## How much can replay

![NLL against replay](../images/doom/quality.png)

The highest replay within a limit of the cost, on straight lines between measured points:
"""

DENSE = """
Tuning changes the NLL without replay too. The last column counts from the dense NLL of the *trained* decoder;
*none*: without replay the decoder is beyond the limit already.
"""

KINDS = """## By kind of motion

A turn moves every pixel, so turning while walking is *turning*. All tables of this section are of seen maps.
"""

KINDS_BEST = """
The highest replay within a cost of {low:.2f}x / {high:.2f}x of the kind's own dense NLL:
"""

KINDS_CALIBRATED = """
Replay and cost in each kind, with the thresholds that were calibrated for {high:.2f}x of all frames:
"""

MAPS = """## By map

The highest replay within {low:.2f}x / {high:.2f}x of the map's own dense NLL. On seen maps all frames of the sequences
count alike here, so shooting, which is easy, weighs more than in play. On the unseen map kinds have their shares.
"""

TAS = """## TAS on camera motion

The paper's claim: where a token's query is like the key at the same place one frame earlier, the MLP's output is like
the output one frame earlier, so it can be replayed. Here the claim is measured directly, on the dense decoder. The
change of an output is |y - y one frame earlier| / |y|. The table has its median, and the rank correlation (Spearman) of
each score with it: 1 ranks all tokens rightly, 0 is chance. Figures are means of the layers.

![Rank correlations](../images/doom/similarity.png)
"""

WORTH = """
In layer 0 TAS ranks the changes ({tas_first:.2f}), in the later layers hardly ({tas_later:.2f} on average). The change
of the MLP's input, which costs as little to measure, ranks them in all ({delta_first:.2f}, {delta_later:.2f}). In
turning frames an MLP's output changes by {turning:.2f} of its own size at the median. A turn of 10 degrees moves the
picture by about one of its eight tokens, so the same place shows something else. While turning, every gate finds less
to replay than while walking. Where the picture stands still, nearly everything could be replayed, but TAS hardly finds
more of it than chance. So on this decoder the claim holds in the first layer only, and a gate that looks at the MLP's
input is better everywhere.
"""

DRIFT = """## Drift

{rollouts} rollouts of {rollout_frames} generated frames begin with 16 true frames. Dense and replay have the same
actions and the same random draws. Thresholds are the thresholds of {high:.2f}x. Two dense rollouts with other draws
show how far apart two equally good continuations are.

![PSNR by generated frame](../images/doom/drift.png)
"""

WINDOWS = """## Sliding windows

Attention to the last {windows} tokens (one and two frames) and to the first 16 positions, which the decoder was not
trained for. Figures are of seen maps. Gates have the thresholds of {high:.2f}x with full attention. The cost counts
from the dense NLL with full attention.
"""

PRECISIONS = """## Precisions

{precision} sequences of each seen map. Gates have the thresholds of float32 at {high:.2f}x.
"""

EVERYTHING = """## All measured points

*agreement*: share of image tokens whose most likely code is the dense decoder's. *PSNR*, *SSIM*: frames of the most
likely codes against frames of the true codes; the tokenizer's decoder makes both. Kinds have their shares of play.
"""

#!/usr/bin/env bash
# diffusers, imageio: load_video repeats frames of a video whose frame times vary, and its rate does not fit the list
#
# One would guess: load_video returns the frames of the file, one picture each; with return_fps=True the number of
# pictures divided by the rate is the length of the video.
#
# What happens (diffusers 0.42.1, imageio 2.38.1, imageio-ffmpeg 0.8.1): screen recordings and phone videos are often
# stored with varying times between frames. imageio lets ffmpeg fill the gaps with copies up to a constant rate, and
# reports the mean rate of the file, not that of the filled video. A video of 60 frames, each third one shown for 0.1 s
# and the others for 0.033 s, so 3.33 s long:
#                                         frames    rate      length
#   PyAV, decord                          60        18        3.33 s
#   load_video(..., return_fps=True)      100       18        5.56 s
# Picture 37 of the list is frame 21 of the file; imageio's get_reader(...).get_data(37) gives the same, and its
# count_frames() gives 60. With equal times all agree. Nothing is logged.
#
# Why it matters: the list goes into video-to-video or becomes training data. 40% of it are copies: movement stops and
# jumps, rewards for motion and smoothness measure the copies, and a video that is resampled by the returned rate is too
# slow. Captions or keyframes with frame numbers from another reader point to other pictures. Read such files with PyAV
# and choose frames by their times.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.13.0 diffusers==0.42.1 transformers==5.24.0 \
    imageio==2.38.1 imageio-ffmpeg==0.8.1 av==18.1.0 decord==0.6.0
cat > "$folder/check.py" <<'PY'
import sys
from fractions import Fraction

import av
import decord
import diffusers
import imageio
import numpy
from diffusers.utils import load_video

print(f"diffusers {diffusers.__version__}, imageio {imageio.__version__}, PyAV {av.__version__}")
FRAMES = 60


def write(path, waits):
    """Write grey frames, each 3 levels brighter than the one before; waits are in 1/30 s."""
    with av.open(path, "w") as container:
        stream = container.add_stream("libx264", rate=30)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        stream.codec_context.time_base = Fraction(1, 30)
        time = 0
        for i, wait in enumerate(waits):
            frame = av.VideoFrame.from_ndarray(numpy.full((64, 64, 3), 20 + 3 * i, dtype=numpy.uint8), format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 30)
            container.mux(stream.encode(frame))
            time += wait
        container.mux(stream.encode())


def numbers(frames):
    return [round((float(numpy.asarray(frame).mean()) - 20) / 3) for frame in frames]


for kind, waits in {"equal": [1] * FRAMES, "varying": [1 if i % 3 else 3 for i in range(FRAMES)]}.items():
    path = f"{sys.argv[1]}/{kind}.mp4"
    write(path, waits)
    with av.open(path) as container:
        by_pyav = numbers(frame.to_ndarray(format="rgb24") for frame in container.decode(video=0))
    by_decord = numbers(frame.asnumpy() for frame in decord.VideoReader(path))
    frames, rate = load_video(path, return_fps=True)
    loaded = numbers(frames)
    reader = imageio.get_reader(path, "ffmpeg")
    chosen, count = numbers([reader.get_data(37)])[0], reader.count_frames()
    print(f"{kind} times: PyAV {len(by_pyav)} frames, decord {len(by_decord)}, load_video {len(loaded)} at {rate}: "
          f"{len(loaded) / rate:.2f} s instead of {sum(waits) / 30:.2f}; imageio's frame 37 of {count} is {chosen}")
    print("  load_video's first 12:", loaded[:12])
    assert by_pyav == by_decord == list(range(FRAMES)) and count == FRAMES
    if kind == "equal":
        assert loaded == by_pyav and chosen == 37
        continue
    assert len(loaded) > 1.5 * FRAMES and sorted(set(loaded)) == by_pyav, "changed: the number of frames"
    assert len(loaded) / rate > 1.5 * sum(waits) / 30, "changed: the rate fits"
    assert loaded[37] == chosen < 30, "changed: frame 37"
print("as described: frames of uneven times are repeated")
PY
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -W ignore "$folder/check.py" "$folder"

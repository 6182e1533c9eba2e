"""From a sound to samples at a family's rate: WAV by the standard library, other files by PyAV; one channel.

Channels are averaged, and whole numbers divided by their range, as librosa and soundfile do. Samples at the family's
own rate are taken as they are. Others are resampled in the frequency domain: spectra are cut at the lower of the two
Nyquist frequencies, with a taper over the last part of it, as sinc filters have one. The authors' pipelines resample
with soxr, whose taper is another: what differs is what lies above nine tenths of that frequency.
"""

import io
import math
import wave

import numpy as np
from jaxtyping import Float32

from kvpatch_jax.cache import Audio
from kvpatch_jax.errors import InputError
from kvpatch_jax.utils.optional_packages import require

PASSED = 0.91
"""Of the lower Nyquist frequency: what passes whole (soxr's "high quality" has as much)."""
RATES = (1_000, 768_000)
"""Samples per second that a sound may have: a header may say anything, and resampling takes room for what it says."""
GUARD = 0.05
"""Seconds of silence behind a sound, into which the ends of its spectrum's filter wrap around."""


def read_sound(audio: Audio, rate: int, name: str = "audio") -> Float32[np.ndarray, " samples"]:
    """Returns a sound's samples at `rate` samples per second, one channel.

    Raises:
      InputError: a file that is no sound, a rate outside `RATES`, or as `Audio.read`. MissingExtraError: no PyAV, and a
      file other than WAV of whole numbers.
    """
    audio = audio.read()
    if isinstance(audio.source, bytes):
        samples, own = _wav(audio.source) or _decoded(audio.source, name)
    else:
        assert audio.rate is not None
        samples, own = audio.source, audio.rate
    if not samples.size:
        raise InputError(f"{name}: got no samples; expected some")
    if not RATES[0] <= own <= RATES[1]:
        raise InputError(f"{name}: got {own} samples per second; expected {RATES[0]} to {RATES[1]}")
    return resampled(samples, own, rate)


def resampled(samples: Float32[np.ndarray, " n"], own: int, rate: int) -> Float32[np.ndarray, " m"]:
    """Returns samples at another rate: m = ⌈n · rate / own⌉ of them."""
    if own == rate:
        return samples
    divisor = math.gcd(own, rate)
    up, down = rate // divisor, own // divisor
    # A whole number of periods of both rates, so that the new samples lie where they should.
    length = -(-(len(samples) + int(GUARD * own)) // down) * down
    spectrum = np.fft.rfft(samples.astype(np.float64), length)

    target = length // down * up
    kept = min(length, target) // 2 + 1
    place = np.arange(kept) / (min(length, target) / 2)
    taper = 0.5 + 0.5 * np.cos(np.pi * np.clip((place - PASSED) / (1 - PASSED), 0, 1))
    whole = np.fft.irfft(spectrum[:kept] * taper, target) * (target / length)
    return whole[: -(-len(samples) * up // down)].astype(np.float32)


def _wav(content: bytes) -> tuple[np.ndarray, int] | None:
    """Returns samples and rate of a WAV file of whole numbers of 1 to 4 bytes; None for another file."""
    try:
        with wave.open(io.BytesIO(content)) as file:
            width, channels, rate = file.getsampwidth(), file.getnchannels(), file.getframerate()
            raw = np.frombuffer(file.readframes(file.getnframes()), np.uint8)
    except (wave.Error, EOFError):
        return None
    if width > 4:
        return None

    # Little-endian numbers, in the highest bytes of an int32; those of one byte have no sign.
    raw = raw[: raw.size // (width * channels) * width * channels].reshape(-1, width)
    wide = np.zeros((len(raw), 4), np.uint8)
    wide[:, 4 - width :] = raw ^ 0x80 if width == 1 else raw
    values = wide.view("<i4").reshape(-1, channels) / 2.0**31
    return values.mean(axis=1).astype(np.float32), rate


def _decoded(content: bytes, name: str) -> tuple[np.ndarray, int]:
    """Returns samples and rate of a file that PyAV decodes."""
    av = require("av", "av", "video")
    parts = []
    try:
        with av.open(io.BytesIO(content)) as container:
            rate = int(container.streams.audio[0].rate)
            resampler = av.AudioResampler(format="fltp", layout=container.streams.audio[0].layout, rate=rate)
            for frame in container.decode(audio=0):
                parts += [part.to_ndarray() for part in resampler.resample(frame)]
            parts += [part.to_ndarray() for part in resampler.resample(None)]
    except (av.FFmpegError, IndexError) as error:
        raise InputError(f"{name}: got a file that cannot be decoded ({error}); expected a sound") from error
    samples = np.concatenate(parts or [np.zeros((1, 0), np.float32)], axis=1)
    return samples.mean(axis=0).astype(np.float32), rate

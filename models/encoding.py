"""The towers' part of a backbone: images, videos and sounds to features in the order of their placeholders."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kvpatch_jax.errors import InputError

from .decoding import LoadedModel
from .families.family import (
    Family,
    Medium,
    Vision,
    count_of,
    feature_arrays,
    feature_order,
    pixels_of,
    placeholders,
    sound_placeholders,
)
from .inputs.buckets import pad_images
from .inputs.texts import check_ids

Features = Float[Array | np.ndarray, "arrays E D"]
"""A tower's output: E image features in the order of their placeholders; n is 1, and one more per deepstack layer."""


class Encoding(LoadedModel):
    """What a backbone gets from its towers.

    Attributes:
      family: as in `ModelBackbone`.
    """

    family: Family

    def encode(
        self,
        input_ids: Int[Array | np.ndarray, "B T"],
        position_ids: Array | np.ndarray | None = None,
        **arrays: Any,
    ) -> Features | None:
        """Runs the vision tower alone: what `embed(features=)` takes in place of pixels, to be kept and used again.

            prompt = backbone.prepare([image])
            features = backbone.encode(**prompt)  # store.put_encoder(id, backbone.fingerprint, features)
            tokens = backbone.embed(**prompt, features=features)  # bit-equal to embed(**prompt)

        Args:
          input_ids, position_ids, arrays: a prompt as `prepare` and `chat` make it; positions play no part.

        Returns:
          Image features [n, E, D] in the order of their placeholders, or None for a prompt without images: the
          features themselves first, then one array per deepstack layer (Qwen3-VL).

        Raises:
          InputError: as `embed`.
        """
        input_ids = check_ids(input_ids, self.config.text.vocabulary, placeholders(self.config))
        return self._encode(input_ids, {name: value for name, value in arrays.items() if value is not None})

    def _encode(self, input_ids: np.ndarray, arrays: Mapping[str, Any]) -> Features | None:
        """Returns the towers' output for a prompt whose ids were checked."""
        family, pads = self.family, placeholders(self.config)
        if family.vision is None and family.audio is None:
            if arrays:
                raise InputError(
                    f"inputs: got {sorted(arrays)} for {family.architecture}, which takes no images; expected ids alone"
                )
            return None

        sounds = sound_placeholders(self.config)
        seen = tuple(pad for pad in pads if pad not in sounds)
        found = [
            self._run_tower(family.vision, self.programs.encode, pixels_of(arrays), input_ids, seen, arrays),
            self._run_tower(
                family.audio, self.programs.encode_audio, arrays.get("input_features"), input_ids, sounds, arrays
            ),
        ]
        parts = [part for part in found if part is not None]
        if not parts:
            return None

        features, expected = parts[0], count_of(input_ids, pads)
        if len(parts) == 2:
            # Sounds have no deepstack features.
            room = len(parts[0]) - len(parts[1])
            features = jnp.concatenate([parts[0], jnp.pad(parts[1], ((0, room), (0, 0), (0, 0)))], axis=1)
        if features.shape[1] != expected:
            raise InputError(
                f"input_ids: got {expected} placeholders; expected {features.shape[1]} for the images, videos and "
                "sounds given"
            )
        # Features lie kind by kind, the placeholders in the prompt's order.
        order = feature_order(input_ids, pads)
        return features if order is None else features[:, order]

    def _run_tower(
        self,
        medium: Vision | Medium | None,
        program: Any,
        inputs: Any,
        input_ids: np.ndarray,
        pads: tuple[int, ...],
        arrays: Mapping[str, Any],
    ) -> Features | None:
        """Returns one tower's features, as many as the prompt has of its placeholders; None where it has no input."""
        if medium is None or medium.plan is None:
            return None
        plan = medium.plan(self.config, input_ids, arrays)
        if not plan:
            return None
        plan = dict(plan)
        inputs = plan.pop("inputs", inputs)
        if self.buckets is not None:
            assert medium.fills is not None
            inputs, plan = pad_images(self.buckets.of_pixels, np.asarray(inputs), plan, medium.fills(self.config))

        features, count = program(self.programs.state, inputs, plan), count_of(input_ids, pads)
        if features.shape[1] == count:
            return features
        # Padding makes features too, behind those that count. Cut on the host, where no number of them compiles.
        return np.asarray(features)[:, :count]

    def _check_features(self, input_ids: np.ndarray, features: Features) -> None:
        """Refuses features that were not made for this model and these placeholders."""
        if self.family.vision is None and self.family.audio is None:
            raise InputError(
                f"features: got some for {self.family.architecture}, which takes no images; expected ids alone"
            )

        count = count_of(input_ids, placeholders(self.config))
        expected = (feature_arrays(self.config), count, self.config.text.width)
        shape = tuple(features.shape) if isinstance(features, np.ndarray | jax.Array) else type(features).__name__
        if shape != expected:
            raise InputError(
                f"features: got shape {shape}; expected {expected} for the image placeholders in input_ids, as "
                "backbone.encode gives them"
            )

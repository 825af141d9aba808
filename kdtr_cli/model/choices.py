"""The few numerical choices on which engines really differ; they stand in every manifest (design: model)."""

from dataclasses import dataclass

from kdtr_cli.errors import InputError

__all__ = ["Choices"]


@dataclass(frozen=True)
class Choices:
    """What a golden and a run must have in common beside the weights."""

    #: eps of the q_a and kv_a norms: "hf" = 1e-6 as transformers has it, "config" = rms_norm_eps as vLLM and SGLang do
    latent_norm_eps: str = "hf"
    #: angles of the rotary tables before cos and sin: float64, or float32 as transformers computes them
    rope_angles: str = "f64"

    def __post_init__(self) -> None:
        for field, value, allowed in (
            ("latent-norm-eps", self.latent_norm_eps, ("hf", "config")),
            ("rope-angles", self.rope_angles, ("f64", "f32")),
        ):
            if value not in allowed:
                raise InputError(f"{field} is {value!r}; allowed: {', '.join(allowed)}")

    def latent_eps(self, rms_norm_eps: float) -> float:
        """The eps of the q_a and kv_a norms for a model with this rms_norm_eps."""
        return 1e-6 if self.latent_norm_eps == "hf" else rms_norm_eps

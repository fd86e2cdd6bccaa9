"""Attributes of optimizers that torch keeps itself."""

from __future__ import annotations

TORCHS_OWN = frozenset(
    {
        "state",
        "param_groups",
        "defaults",
        "parts",
        "step",
        "_opt_called",
        "_hook_for_profile",
        "_need_device_dtype_check_for_fused",
        "_optimizer_load_state_dict_post_hooks",
        "_optimizer_load_state_dict_pre_hooks",
        "_optimizer_state_dict_post_hooks",
        "_optimizer_state_dict_pre_hooks",
        "_optimizer_step_post_hooks",
        "_optimizer_step_pre_hooks",
        "_patch_step_function",
        "_step_count",
        "_warned_capturable_if_run_uncaptured",
        "_zero_grad_profile_name",
    }
)
"""Attributes that torch keeps itself, and whose values no update depends on."""

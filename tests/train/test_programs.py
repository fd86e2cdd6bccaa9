"""Programs of users: each computes what a plain loop of one process does, or is refused before its first
step. Under no plan, and after no move, anything else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from elastic_train.testing.gloo_pool import GlooPool
from tests.train import programs_branches as branches
from tests.train import programs_edits as edits
from tests.train import programs_epochs as epochs
from tests.train import programs_freezing as freezing
from tests.train import programs_hidden as hidden
from tests.train import programs_loops as loops
from tests.train import programs_models as of_models
from tests.train import programs_optimizers as of_optimizers
from tests.train import programs_places as places
from tests.train import programs_schedules as of_schedules
from tests.train import programs_state as of_state
from tests.train import programs_unkept as unkept
from tests.train import programs_unusual as unusual
from tests.train.programs import ALONE, Program, hold

pytestmark = [
    pytest.mark.ring2,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # torch.compile looks at it
]

IN_STEP = r"model\.net\.a\.weight: its gradient was changed inside the step"
UNLIKE = r"model\..*: requires_grad is not the same on all ranks"
LEFT = r"model\.net\.a\..*: requires_grad was changed for a micro-batch and not changed back"
CHOOSES = r"parallelism\.dp_shard: forward calls '.*' for some micro-batches and not for others"
HANDED_OUT = r"task\.model: .* is the module that an earlier call gave too"
OF_WHOLES = r"parallelism\.dp_shard: the optimizer 'opt' is L-BFGS"
OF_SHARDS = r"parallelism\.dp_shard: .*uses a parameter while it is sharded"

TABLE = [
    Program(make=of_optimizers.counter_in_groups),
    Program(make=of_optimizers.counter_on_object),
    Program(make=of_optimizers.counter_under_key),
    Program(make=of_optimizers.tensor_in_group),
    Program(make=of_optimizers.averages_on_object, refused=r"the attribute 'averages' of Averages"),
    Program(make=of_optimizers.counts_elements),
    Program(make=of_optimizers.schedule_free),
    Program(make=of_optimizers.one_cycle_adamw),
    Program(make=of_optimizers.one_cycle_sgd),
    Program(make=of_optimizers.cyclic_sgd),
    Program(make=of_optimizers.plateau),
    Program(make=of_optimizers.warm_restarts),
    Program(make=of_optimizers.sequential),
    Program(make=of_optimizers.fused_adamw),
    Program(make=of_optimizers.amsgrad),
    Program(make=of_optimizers.nadam),
    Program(make=of_optimizers.asgd),
    Program(make=of_optimizers.adagrad),
    Program(make=of_optimizers.average_by_hook, refused=r"the attribute 'avg' of SGD"),
    Program(make=of_optimizers.counting_hook, refused=r"the hook .*count of SGD.step\(\) keeps state"),
    Program(make=of_optimizers.clamping_hook),
    Program(make=of_optimizers.empty_parameter),
    Program(
        make=of_optimizers.sparse_adam,
        refused=r"SparseAdam cannot be tried on sharded .* does not support dense gradients",
        ways=("fsdp2",),
    ),
    Program(make=of_models.set_in_constructor),
    Program(make=of_models.applied),
    Program(make=of_models.attention),
    Program(make=of_models.drawn),
    Program(make=of_models.listed_parameter, refused=r"model\.weights\[0\]: .* nn.ParameterList"),
    Program(make=of_models.lazy, refused=r"model\.first\.weight: has no shape .* nn.Linear"),
    Program(make=of_models.max_norm, refused=r"model\.embed\.weight: forward changes this parameter"),
    Program(make=of_models.max_norm, most=1, ways=ALONE),
    Program(make=of_models.clamped_in_forward, refused=r"model\.a\.weight: forward changes this parameter"),
    Program(make=of_models.clamped_in_forward, most=1, ways=ALONE),
    Program(
        make=of_models.clamped_when_evaluated,
        refused=r"model\.a\.weight: the evaluation changes this parameter",
        ways=("dp2",),
    ),
    Program(make=of_models.clamped_when_evaluated, most=1, ways=ALONE),
    Program(make=of_models.max_norm_evaluated, most=1, ways=ALONE),
    Program(make=of_models.normalised_data, refused=r"model\.b\.weight: forward changes this parameter"),
    Program(make=of_models.assigned_buffer, refused=r"model\.mean: forward changes this buffer"),
    Program(make=of_models.assigned_buffer, most=1, ways=ALONE),
    Program(make=of_models.buffer_in_place, refused=r"model\.mean: forward changes this buffer"),
    Program(make=of_models.buffer_in_place, most=1, ways=ALONE),
    Program(make=of_models.spectral_norm, refused=r"_[uv]: forward changes this buffer"),
    Program(make=of_models.spectral_norm, most=1, ways=ALONE),
    Program(make=of_models.counter, refused=r"model\.calls: forward changes this attribute"),
    Program(make=of_models.only_counts, refused=r"model\.calls: forward changes this attribute"),
    Program(make=of_models.only_counts, most=1, ways=ALONE, refused=r"model\.calls: .* get_extra_state"),
    Program(make=of_models.moving_attribute, refused=r"model\.seen: forward changes this attribute"),
    Program(make=of_models.own_generator, refused=r"model\.generator: forward changes this attribute"),
    Program(make=of_models.hidden_generator, refused=r"forward changes .*\._generator"),
    Program(make=of_models.extra_state, refused=r"model\.scale: forward changes this attribute"),
    Program(make=of_models.extra_state, most=1, ways=ALONE),
    Program(make=of_models.cached),
    Program(make=of_models.writes_inputs),
    Program(make=of_models.standard_generators),
    Program(make=of_models.frozen_part),
    Program(make=of_models.gradient_hook, refused_on={"fsdp2": r"model\.a\.weight: has a hook .*dp_shard=1"}),
    Program(make=of_models.tied),
    Program(make=of_models.weight_norm),
    Program(make=of_models.child_weights, refused_on={"fsdp2": OF_SHARDS}),
    Program(make=of_models.branches),
    Program(make=of_models.batch_norm),
    Program(make=of_models.recurrent),
    Program(
        make=of_models.complex_parameter, refused=r"model\.weight: is complex128.* torch.view_as_complex"
    ),
    Program(make=of_models.complex_of_halves, refused=r"model\.weight: is complex64, and gradients"),
    Program(make=of_state.weighs_by_past_losses, refused=r"task\.loss: .* the task's attribute 'mean'"),
    Program(make=of_state.weighs_by_past_losses, most=1, ways=ALONE, refused=r"the task's attribute 'mean'"),
    Program(make=of_state.counts_calls, refused=r"task\.loss: .* the task's attribute 'calls'"),
    Program(make=of_state.counts_in_a_global, refused=r"task\.loss: each call changes .*\._seen"),
    Program(make=of_state.counts_inputs, refused=r"task\.inputs: .* the task's attribute 'calls'"),
    Program(make=of_state.keeps_its_last_loss),
    Program(make=of_state.penalises_its_model, refused_on={"fsdp2": OF_SHARDS}),
    Program(make=of_state.backward_state, refused=r"model\.scale: backward changes this attribute"),
    Program(make=of_state.buffer_in_backward, refused=r"model\.mean: forward changes this buffer"),
    Program(make=of_state.buffer_in_backward, most=1, ways=ALONE),
    Program(
        make=of_state.mean_teacher, refused=r"move' of AdamW holds the parameter 'student\.a\.weight' beside"
    ),
    Program(make=of_state.mean_teacher_in_groups),
    Program(make=of_state.pruned),
    Program(make=of_state.old_weight_norm),
    Program(make=of_state.orthogonal),
    Program(
        make=of_state.new_parameter, refused=r"model: forward gives another output|model\.b\.weight: forward"
    ),
    Program(make=of_state.made_lazily, refused=r"model\.more: forward makes it"),
    Program(
        make=of_state.mixed_dtypes,
        rtol=1e-7,
        refused_on={"fsdp2": r"parallelism\.dp_shard: .* is torch\.float"},
    ),
    Program(make=of_state.cumulative_norm),
    Program(make=of_state.shared_across),
    Program(make=of_state.toggles_itself, refused=r"model\.calls: forward changes this buffer"),
    Program(make=of_state.mode_in_forward, refused=r"model: forward gives another output"),
    Program(make=of_schedules.decaying_object),
    Program(
        make=of_schedules.decaying_closure,
        refused=r"task\.schedule: .*factor of LambdaLR gives another factor",
    ),
    Program(make=of_schedules.own_schedule),
    Program(make=of_schedules.chained),
    Program(make=of_schedules.multiplicative),
    Program(make=of_schedules.swa_rate),
    Program(
        make=of_schedules.lookahead, refused=r"Lookahead keeps a AdamW as 'inner', whose state would be lost"
    ),
    Program(make=of_schedules.lamb),
    Program(make=of_schedules.centred, refused_on={"fsdp2": r"Centred updates sharded parameters otherwise"}),
    Program(make=of_schedules.every_second_step),
    Program(make=loops.a_loop),
    Program(make=edits.two_updates),
    Program(make=edits.lbfgs, rtol=1e-9, refused_on={"fsdp2": OF_WHOLES}),
    Program(make=edits.lbfgs_with_line_search, rtol=1e-9, refused_on={"fsdp2": OF_WHOLES}),
    Program(
        make=edits.updates_the_same_twice, refused=r"step\.update: 'opt' was updated in this step before"
    ),
    Program(make=edits.several_backwards),
    Program(make=edits.clips_by_hand, refused=IN_STEP, ways=("dp1", "dp2", "2-3-1", "resume")),
    Program(make=edits.clips_in_a_hook),
    Program(make=edits.zeroes_by_hand),
    Program(make=edits.backwards_by_hand, refused=IN_STEP),
    Program(make=edits.drops_out_later),
    Program(make=edits.masks_later),
    Program(make=edits.new_mask_later),
    Program(
        make=edits.adds_a_group, refused=r"ctx\.optimizer\('opt'\): it was given another parameter group"
    ),
    Program(make=edits.hooks_later, refused=r"model\.net\.a: the loop changed the hooks of this module"),
    Program(make=edits.replaces_a_module, refused=r"model\.net\.blocks\.0\.1: the loop changed this module"),
    Program(make=edits.draws_between_steps),
    Program(make=edits.reads_gradients),
    Program(make=loops.copied_average),
    Program(make=loops.averaged_model),
    Program(make=loops.unfreezes),
    Program(make=loops.clamps),
    Program(make=loops.clamps_before, refused=r"model\.net\.a\.weight: the loop changes this tensor"),
    Program(make=loops.clamps_inside, refused=r"model\.net\.a\.weight: this parameter was changed during"),
    Program(make=loops.steps_itself, refused=r"model\.net\.a\.weight: this parameter was changed during"),
    Program(make=loops.rate_by_hand),
    Program(make=loops.rate_of_the_step),
    Program(make=loops.scheduled),
    Program(make=loops.fixed_noise),
    Program(make=loops.queue),
    Program(make=loops.evaluation_mode),
    Program(make=loops.hook_of_the_loop, refused_on={"fsdp2": r"model\.net\.a\.weight: has a hook"}),
    Program(make=loops.carries_columns),
    Program(make=epochs.loop_over_epochs, refused="there is a loop around it"),
    Program(make=epochs.epoch_in_a_function, refused="there is a loop around it"),
    Program(make=epochs.another_data_set_later, refused="it was called before, and the batches of that call"),
    Program(make=epochs.asked_for_one_by_one),
    Program(make=unkept.schedule_of_a_variable, refused=r"the state of 'schedule' \(StepLR\) is not kept"),
    Program(make=unkept.schedules_of_a_list, refused=r"the state of 'schedules' \(StepLR\) is not kept"),
    Program(
        make=unkept.average_of_a_variable, refused=r"the state of 'average' \(AveragedModel\) is not kept"
    ),
    Program(make=unkept.queue_of_a_variable, refused=r"the state of 'kept' \(Queue\) is not kept"),
    Program(make=unkept.losses_that_decide, refused="variable 'seen' goes from one step to the next"),
    Program(make=unkept.losses_that_are_told),
    Program(make=loops.penalty, refused_on={"fsdp2": OF_SHARDS}),
    Program(make=loops.other_method, refused_on={"fsdp2": OF_SHARDS}),
    Program(make=hidden.least_loss, refused=r"task\.loss: .* the task's attribute 'least'"),
    Program(make=hidden.first_loss, refused=r"task\.loss: .* the task's attribute 'first'"),
    Program(make=hidden.keeps_its_output),
    Program(make=hidden.keeps_its_losses),
    Program(make=hidden.keeps_losses_in_a_global),
    Program(make=hidden.reads_its_losses, refused=r"task\.loss: .* the task's attribute 'losses'"),
    Program(make=hidden.on_class, refused=r"forward changes .*OnClass\.calls"),
    Program(make=hidden.in_global, refused=r"forward changes .*\._CALLS"),
    Program(make=hidden.in_list, refused=r"forward changes .*\._HISTORY"),
    Program(make=hidden.in_bank, refused=r"forward changes .*\._BANK"),
    Program(make=hidden.in_closure, refused=r"forward changes 'calls' in .*_counting"),
    Program(make=hidden.in_global_closure, refused=r"forward changes 'calls' in .*_counting"),
    Program(make=hidden.in_default, refused=r"forward changes .*_remembers\.default 0"),
    Program(make=hidden.on_function, refused=r"forward changes .*_attributed\.calls"),
    Program(make=hidden.in_object, refused=r"forward changes .*\._TRACKER"),
    Program(make=hidden.in_function, refused=r"backward changes .*Doubling\.calls"),
    Program(make=hidden.in_tensor_hook, refused=r"backward changes .*\._AT_BACKWARD"),
    Program(make=hidden.global_generator, refused=r"forward changes .*\._rng"),
    Program(make=hidden.rare_generator, refused=r"forward changes .*\._python"),
    Program(make=hidden.cached_mask),
    Program(make=hidden.first_call, refused=r"model\.scale: forward changes this attribute"),
    Program(make=hidden.lazy_table),
    Program(make=hidden.least, refused=r"model\.least: forward changes this attribute"),
    Program(make=hidden.act_norm, refused=r"model\.shift: forward changes this parameter"),
    Program(make=unusual.parametrized),
    Program(make=unusual.functional_dropout),
    Program(make=unusual.tied_late),
    Program(make=unusual.casts),
    Program(make=unusual.double_backward),
    Program(make=unusual.hooks_parts),
    Program(make=unusual.mutates_outside, refused=r"model\.mean: forward changes this buffer"),
    Program(make=freezing.flips_grad, refused_on={"fsdp2": UNLIKE}),
    Program(make=freezing.flips_block, refused_on={"fsdp2": UNLIKE}),
    Program(make=freezing.flips_in_part, refused_on={"fsdp2": UNLIKE}),
    Program(make=freezing.freezes_by_samples, refused_on={"fsdp2": UNLIKE}),
    Program(make=freezing.freezes_itself),
    Program(make=freezing.freezes_for_good, refused=r"model\.a\.weight: forward sets requires_grad at some"),
    Program(make=freezing.freezes_the_critic),
    Program(make=freezing.flips_in_body, refused=LEFT, ways=("dp2", "2-3-1")),
    Program(make=freezing.flips_in_body, refused=UNLIKE, ways=("fsdp2",)),
    Program(make=freezing.freezes_in_body, refused=LEFT, ways=("dp2", "2-3-1")),
    Program(make=freezing.keeps_fakes),
    Program(make=freezing.reads_another_fake, refused=r"batch: 'seen' goes from one micro-batch"),
    Program(make=unusual.registers),
    Program(
        make=unusual.stochastic_depth, refused_on={"fsdp2": CHOOSES}
    ),  # tests/train/test_sharded_trial.py
    Program(make=unusual.layer_drop, refused_on={"fsdp2": CHOOSES}),
    Program(make=branches.chooses_block, refused_on={"fsdp2": CHOOSES}),
    Program(make=branches.calls_the_occupied, refused_on={"fsdp2": CHOOSES}),
    Program(make=branches.looks_at_values),
    Program(make=unusual.holds_its_model, refused=HANDED_OUT),
    Program(make=unusual.caches_a_part, refused=HANDED_OUT),
    Program(make=unusual.default_with_tensors, refused=HANDED_OUT),
    Program(make=unusual.default_without_tensors),
    Program(
        make=unusual.loss_of_a_mean, refused=r"task\.loss: returned a tensor of shape \(\) and not a pair"
    ),
    Program(
        make=unusual.loss_of_no_count, refused=r"task\.loss: its second value must be a number .* NoneType"
    ),
    Program(make=unusual.checkpointed),
    Program(make=unusual.shared_inside),
    Program(make=hidden.counts_steps_in_a_global, refused=r"AdamW\.step\(\) changes .*\._STEPS"),
    Program(make=hidden.counts_steps_on_the_class, refused=r"WithGlobal\.step\(\) changes .*\.steps"),
    Program(make=hidden.tensor_rate),
    Program(
        make=hidden.counts_reads, refused=r"task\.dataset: reading a sample changes .*CountsReads\.reads"
    ),
    Program(make=unusual.carries_hidden_state, refused=r"batch: 'last' goes from one micro-batch"),
    Program(make=unusual.appends_to_a_queue, refused=r"batch: 'queue' goes from one micro-batch"),
    Program(make=unusual.numbers_micro_batches, refused=r"batch: the number 'number' of a micro-batch"),
    Program(make=unusual.writes_a_tensor, refused=r"batch: 'mean' goes from one micro-batch"),
    Program(make=unusual.keeps_attributes, refused=r"batch: 'mean' goes from one micro-batch"),
    Program(make=unusual.adds_up_losses),
    Program(make=unusual.draws_in_the_body),
    Program(make=unusual.rates_as_tensors),
    Program(make=unusual.swaps_data, refused_on={"fsdp2": r"dp_shard: .*swaps_data assigns to the \.data"}),
    Program(make=unusual.accumulates_in_a_module, refused=r"batch: model\.net\.scale goes from one"),
    Program(
        make=edits.counts_in_a_variable, refused=r"loop: the variable 'mean' goes from one step to the next"
    ),
    Program(
        make=places.by_rank, refused=r"model: forward gives another .* it asks for get_rank\(\), is_init"
    ),
    Program(make=places.by_size, refused=r"model: forward gives another .* it asks for get_world_size\(\)"),
    Program(make=places.by_size, most=1, ways=ALONE),
    Program(make=places.by_variable, refused=r"model: forward gives another .* os\.environ\['RANK'\]"),
    Program(make=places.by_process, refused=r"model: forward gives another .* it asks for getpid\(\)"),
    Program(make=places.speaks_once),
    Program(make=places.by_gradients, refused=r"model: forward reads the gradients of parameters"),
    Program(make=places.by_gradients, most=1, ways=ALONE),
    Program(make=places.looks_at_gradients, refused=r"task\.loss: it reads the gradients of parameters"),
    Program(
        make=places.talks_itself, refused=r"task\.loss: .* it calls torch\.distributed\.all_reduce itself"
    ),
    Program(make=places.asks_in_a_loop, refused=r"model\.net: forward gives another .* it asks for get_rank"),
    Program(make=places.adds_its_rank, refused=r"ctx\.rank: a loss is computed with it"),
    Program(make=places.tells_its_rank),
    Program(make=unusual.compiled),
    Program(make=unusual.compiled_in_place),
    Program(make=unusual.compiled_blocks),
    Program(make=unusual.compiled_norm),
]


def _cases() -> Iterator[Any]:
    for program in TABLE:
        for way in program.ways:
            quick = way == ("2-3-1" if "2-3-1" in program.ways else program.ways[-1])  # others: the matrix
            marks = () if quick else (pytest.mark.matrix,)
            most = "" if program.most > 1 else "-alone"
            yield pytest.param(program, way, id=f"{program.name}{most}-{way}", marks=marks)


@pytest.mark.parametrize(("program", "way"), list(_cases()))
def test_a_program_is_its_plain_loop_or_is_refused(pool: GlooPool, program: Program, way: str) -> None:
    hold(program, way, pool)

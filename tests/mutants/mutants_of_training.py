# ruff: noqa: E501 - a row is three lines
"""Faults in what trains and observes layers: auxiliary losses, router biases, padding masks, batch_invariant, metrics
(``mutants_table``).

Three lines a row: fault and file, text and replacement, test.
"""

from __future__ import annotations

from tests.mutants.mutants import Mutant

_LOSSES = "nn/test_nn_aux_loss.py::test_losses_and_all_gradients_are_those_of_one_process[4-all-biased-alltoall]"
_LOSSES_IN_DDP = "nn/test_nn_aux_loss.py::test_losses_and_all_gradients_are_those_of_one_process[2-all-alltoall-ddp]"
_BIASES = "nn/test_nn_aux_loss.py::test_biases_follow_the_load_of_all_tokens[4-False]"
_PADDING = "nn/test_nn_aux_loss.py::test_padding_is_no_token[alltoall]"

# fmt: off
AUX_LOSSES = (
    Mutant("padding counts in auxiliary losses", "nn/aux_loss.py",
           "real = logits.new_ones(tokens) if present is None else present.to(logits.dtype)", "real = logits.new_ones(tokens)",
           _LOSSES),
    Mutant("auxiliary losses over all are of own tokens", "nn/aux_loss.py",
           'if self.config.over == "all" and self.ranks > 1:', "if False:",
           _LOSSES),
    Mutant("sequences of padding alone count in the mean", "nn/aux_loss.py",
           "(lengths > 0).sum()[None]", "(lengths >= 0).sum()[None]",
           _LOSSES),
    Mutant("the correction bias chooses the experts of losses", "nn/aux_loss.py",
           "ids = scores.topk(topk, dim=-1).indices if self.router.correction_bias else routing.topk_ids.long()", "ids = routing.topk_ids.long()",
           _LOSSES),
    Mutant("auxiliary losses are a sum where gradients are a mean", "nn/aux_loss.py",
           "terms = self._terms(routing, present, length) * mean_over", "terms = self._terms(routing, present, length)",
           _LOSSES_IN_DDP),
    Mutant("auxiliary losses do not take the factor of the loss", "nn/aux_loss.py",
           "return grad, _read_scale(scale, grad).to(ctx.dtype), None", "return grad, torch.ones_like(scale, dtype=ctx.dtype), None",
           "nn/test_nn_aux_loss.py::test_gradients_of_losses_take_the_factor_of_the_loss"),
    Mutant("backward without add_aux_losses loses the losses", "nn/aux_loss.py",
           "        if not self.scaled:\n", "        if self.scaled is None:\n",
           "nn/test_nn_aux_loss.py::test_backward_without_the_sum_is_refused"),
)

ROUTER_BIASES = (
    Mutant("biases follow the load of own tokens", "nn/parallel.py",
           'sum_over_ranks(loads, _peers(model, group, "the sum of loads"))', "pass",
           _BIASES),
    Mutant("biases move by the load, not by its sign", "nn/parallel.py",
           "rate * (load.sum() - len(load) * load).sign()", "rate * (load.sum() - len(load) * load)",
           _BIASES),
    Mutant("busy experts get busier", "nn/parallel.py",
           "(load.sum() - len(load) * load).sign()", "(len(load) * load - load.sum()).sign()",
           _BIASES),
    Mutant("loads of earlier steps count in later ones", "nn/parallel.py",
           "        load.zero_()\n", "",
           _BIASES),
    Mutant("tokens of evaluation move biases", "nn/moe.py",
           "if self.router_load is not None and self.training:", "if self.router_load is not None:",
           _BIASES),
    Mutant("padding moves biases", "nn/moe.py",
           "self.router_load.record(ids)", "self.router_load.record(routing.topk_ids)",
           _BIASES),
    Mutant("a recomputed forward counts again", "nn/load.py",
           "if torch._C._current_graph_task_id() != -1:", "if total is None:",
           "nn/test_nn_aux_loss.py::test_recomputed_and_compiled_layers_add_and_count_once[kept]"),
)

PADDING_MASKS = (
    Mutant("padding travels", "nn/moe.py",
           "ids = routing.topk_ids if present is None else routing.topk_ids.where(present[:, None], -1)", "ids = routing.topk_ids",
           "nn/test_nn_aux_loss.py::test_padding_travels_nowhere"),
    Mutant("what padding holds reaches gradients", "nn/moe.py",
           "tokens = tokens.where(present[:, None], 0)", "pass",
           _PADDING),
    Mutant("the shared expert's bias stands in padding", "nn/moe.py",
           "shared = shared.where(present[:, None], 0)", "pass",
           _PADDING),
    Mutant("a padding mask is read as an attention mask", "nn/moe.py",
           "present = ~padding_mask.reshape(-1)", "present = padding_mask.reshape(-1)",
           _PADDING),
    Mutant("rows past num_tokens are tokens where no mask pads them", "nn/moe.py",
           "first if present is None else first & present", "first if present is None else first | present",
           _PADDING),
)

BATCH_INVARIANT = (
    Mutant("batch_invariant: products have as many rows as there are", "rows/batch_invariant.py",
           "        block[: len(part)] = part\n        torch.mm(block, matrix, out=product)", "        product = torch.mm(part.to(matrix.dtype), matrix)",
           "nn/test_batch_invariant.py::test_bits_do_not_depend_on_the_batch[plain]"),
    Mutant("batch_invariant: experts multiply by torch's choice", "nn/placed_experts.py",
           "self.batch_invariant = config.batch_invariant", "self.batch_invariant = False",
           "nn/test_batch_invariant.py::test_bits_do_not_depend_on_the_batch[plain]"),
    Mutant("batch_invariant: sums on the experts' rank are let through", "config.py",
           '("pre_reduce", (False, None),', '("pre_reduce", (False, None, True),',
           "project/test_config.py::test_batch_invariant_refuses_all_in_which_other_tokens_or_ranks_count"),
    Mutant("batch_invariant: rows are summed on the experts' rank", "config.py",
           'object.__setattr__(self, "pre_reduce", not self.batch_invariant)', 'object.__setattr__(self, "pre_reduce", True)',
           "nn/test_batch_invariant.py::test_a_sum_on_the_experts_rank_depends_on_the_ranks"),
    Mutant("batch_invariant: the sigmoid is torch's", "rows/batch_invariant.py",
           "result = 1.0 / (exp(-x) + 1.0)", "result = torch.sigmoid(x)",
           "nn/test_batch_invariant.py::test_places_in_a_tensor_do_not_change_the_sigmoid_and_its_gradient"),
    Mutant("batch_invariant: torch.topk breaks ties", "rows/choose.py",
           "return values.sort(dim=-1, descending=True, stable=True).indices", "return values.topk(values.shape[1], dim=-1).indices",
           "nn/test_batch_invariant.py::test_of_equal_scores_the_lower_id_is_first"),
    Mutant("batch_invariant: products that depend on a row's place pass", "rows/batch_invariant.py",
           "if not torch.equal(out, out[:1].expand_as(out)):", "if out is None:",
           "nn/test_batch_invariant.py::test_sizes_whose_products_depend_on_a_rows_place_are_refused"),
)

METRICS = (
    Mutant("every rank is a label of its own", "metrics.py",
           'str(peer) if peer < MOST_PEERS else "rest"', "str(peer)",
           "transports/test_metrics.py::test_labels_are_bounded"),
    Mutant("the rest of the ranks is the last of them", "metrics.py",
           "found[_label(peer)] += value", "found[_label(peer)] = value",
           "transports/test_metrics.py::test_labels_are_bounded"),
    Mutant("failures have a sample for each rank", "metrics.py",
           "by_label[phase, kind, _label(peer)] += count", "by_label[phase, kind, str(peer)] += count",
           "transports/test_metrics.py::test_labels_are_bounded"),
    Mutant("numbers of closed communicators are not used again", "metrics.py",
           "self._open[self._open.index(None)] = lanes", "self._open.append(lanes)",
           "transports/test_metrics.py::test_communicators_have_the_least_free_number"),
)
# fmt: on

OF_TRAINING = (*AUX_LOSSES, *ROUTER_BIASES, *PADDING_MASKS, *BATCH_INVARIANT, *METRICS)

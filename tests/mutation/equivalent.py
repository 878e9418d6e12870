"""equivalent: mutants that no test can tell from the pass, each with the reason. They count for nothing."""

EQUIVALENT: dict[str, str] = {
    "passes/borders.py Drafts._work: node.target is not operator.getitem and (not self.judge.idle(node))"
    "  ->  not self.judge.idle(node)": "what takes a call apart is a view, which is idle",
    "passes/outline_mhc.py attributes: scaling.eps if scaling is not None else None  ->  scaling.eps": "a boundary"
    " without a scaling breaks a rule before its attributes are read",
    "passes/partition.py partition: late  ->  True": "a last draft without nodes becomes no piece",
    "passes/outline_output_projection.py Factor.rounding: node is not self.rows and formats_of(node, self.rows)"
    "  ->  formats_of(node, self.rows)": "from rows to themselves no node leads, so no format is read",
    "passes/analysis/counts.py counts: gm not in known  ->  True": "a body is counted again, and comes out the same",
    "passes/analysis/row_flows.py dims_of: value or ()  ->  value": "no dimensions are all: rows are among them, and"
    " what sums them up is told before they are read",
    "passes/analysis/row_rules.py of_first.rule: any((look.layout(arg) is not None for arg in tensors(node) if arg is"
    " not node.args[0]))  ->  False": "no operator that it serves takes a second tensor",
    "passes/analysis/rows.py row_demand: inputs.starts is not None and inputs.late_floors is not None and"
    " (inputs.logit_rows is not None)  ->  inputs.starts is not None and inputs.logit_rows is not None": "without late"
    " floors no mask is known to be theirs, and no window stops",
    "passes/analysis/rows.py Forward._masks: meaning is not None and meaning.of in FLOORS.values()  ->  meaning is not"
    " None": "others are kept under other words, for which nobody asks",
    "passes/analysis/row_rules.py rule_of: is_pointwise and (not random) and (not written_args(node))  ->  is_pointwise"
    " and (not written_args(node))": "no operator of torch is tagged as both",
    "passes/analysis/algebra.py expression: _integer(size) if isinstance(size, int) else _expression(as_python(size))"
    "  ->  _expression(as_python(size))": "the text of a number is evaluated to it",
    "passes/analysis/algebra.py multiple: unit != 0 and (size / unit).is_integer is True  ->"
    "  (size / unit).is_integer is True": "what is divided by 0 is no integer to sympy",
    "passes/analysis/capturable.py Obstacles.of: self.device.type != 'cpu' and effect_of(node) == 'collective' and ((by"
    " := _talks_by(node, self.device)) not in ON_DEVICE)  ->  self.device.type != 'cpu' and (by := _talks_by(node,"
    " self.device)) not in ON_DEVICE": "nothing else has the name of a group among its arguments",
    "passes/analysis/capturable.py Obstacles._inside: body not in self._bodies  ->  True": "a body is read again, and"
    " has the same obstacles",
    "passes/analysis/capturable.py _indices: len(node.args) > 1  ->  len(node.args) >= 1": "a write by index has three"
    " arguments",
    "passes/analysis/capturable.py _indices: len(node.args) > 1  with 1 + 1": "likewise",
    "passes/analysis/collectives.py _begun: node.op == 'call_function' and node.target is invoke_subgraph  ->"
    "  node.target is invoke_subgraph": "what is no call has a name for its target",
    "passes/analysis/masks.py _try: one.dtype.itemsize == 1  ->  False": "torch 2.13 chooses among values of all types"
    " of one byte; 2.11, with which a test fails, does not for fp4",
    "passes/analysis/masks.py _Spread.ends: at in done  ->  False": "what is run again gives the same",
    "passes/analysis/masks.py _Spread.ends: node.op == 'output' or effect_of(node) is not None or (not isinstance("
    "node.meta.get('val'), HELD))  ->  effect_of(node) is not None or not isinstance(node.meta.get('val'), HELD)": ""
    "what is returned has no meta, and is no operator that runs",
    "passes/analysis/masks.py _is_mask: node.op == 'call_function' and value is not None and (value.dtype is"
    " torch.bool)  ->  value is not None and value.dtype is torch.bool": "only calls read masks and are tensors",
    "passes/restrict_index_scores.py takes_keys_otherwise: wanted <= site.operands.keys()  ->  wanted <"
    " site.operands.keys()": "the candidates are an operand, too",
    "passes/re_indexers.py Site.kept: keeps and _repeats(node, self.whole_mask, attrs['block'])  ->  _repeats(node,"
    " self.whole_mask, attrs['block'])": "all else that such a region returns are numbers, and no mask",
    "passes/re_indexers.py _repeats: numbers(kept, 0) > 0  with 0 + 1": "a mask that keeps fewer tells as much",
    "passes/open_shared.py _holds: id(body) not in known  ->  True": "a body is looked into again, and holds the same",
    "passes/take_in_gathers.py Site.written_over: self.order[node] < self.order[self.call]  ->  self.order[node] <="
    " self.order[self.call]": "the region itself is found only where it reads what is found, which is refused",
    "passes/mhc_predictions.py _with_rows_taken: user.target is aten.index.Tensor and user.args[0] is value  ->"
    "  user.target is aten.index.Tensor": "what is predicted are floats, which index nothing",
}

"""What each layer of V4.1 reads and publishes: the causal encoder-decoder schedule. Knows layers, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from engine.families.fields import Fields, refusal

_RATIOS = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class Role:
    """One layer. Its entries and index keys are those of `source`; its selection is the one `chooser` published."""

    ratio: int  # tokens per compressed entry; 0: the layer sees its window only
    source: int | None  # this layer itself: it owns entries and index keys
    chooser: int | None  # this layer itself: it chooses entries anew
    proposes: bool  # publishes the candidate blocks
    restricted: bool  # chooses within the candidate blocks
    place: int  # of its source among the sources of that ratio: the layer within the cache groups


@dataclass(frozen=True, slots=True)
class Schedule:
    """The roles of all layers."""

    roles: tuple[Role, ...]

    def sources(self, ratio: int) -> tuple[int, ...]:
        """Layers that own entries of this ratio, ascending: their order in the cache groups."""
        return tuple(i for i, role in enumerate(self.roles) if role.ratio == ratio and role.source == i)

    @property
    def ratios(self) -> tuple[int, ...]:
        """Ratios of which entries exist, ascending."""
        return tuple(sorted({role.ratio for role in self.roles} - {0}))

    @property
    def last_source(self) -> int | None:
        """The layer above which nobody owns global records: where the decoder half begins."""
        owned = [i for i, role in enumerate(self.roles) if role.source == i]
        return owned[-1] if owned else None


def parse_schedule(fields: Fields, layers: int, drafts: int) -> Schedule:
    """The schedule a config describes. Raises CheckpointError naming the key for one that is not V4.1's kind."""
    ratios = _ratios(fields, layers, drafts)
    sources = fields.ascending("kv_source_layer_ids", layers)
    choosers = fields.ascending("index_source_layer_ids", layers)
    proposer = fields.values.get("candidate_source_layer_id", -1)
    if proposer not in (-1, None, *choosers):
        raise refusal("candidate_source_layer_id", f"{proposer!r} is not one of index_source_layer_ids {choosers}")
    if missing := set(sources) - set(choosers):
        raise refusal("index_source_layer_ids", f"entry sources {sorted(missing)} choose nothing")
    roles = tuple(_role(i, ratios, sources, choosers, proposer) for i in range(layers))
    return Schedule(roles)


def _ratios(fields: Fields, layers: int, drafts: int) -> tuple[int, ...]:
    """One ratio per layer, and one more for each draft layer or none."""
    given = fields.values.get("compress_ratios")
    if not isinstance(given, list) or len(given) not in (layers, layers + drafts):
        found = len(given) if isinstance(given, list) else given
        raise refusal("compress_ratios", f"{found} entries for {layers} layers", "list one ratio per layer")
    if unknown := {repr(ratio) for ratio in given if ratio not in _RATIOS or isinstance(ratio, bool)}:
        raise refusal("compress_ratios", f"{', '.join(sorted(unknown))} unknown", f"use {_RATIOS}")
    named = fields.values.get("layer_types")
    if named is not None and (not isinstance(named, list) or len(named) not in (layers, layers + drafts)):
        found = len(named) if isinstance(named, list) else named
        raise refusal("layer_types", f"{found} entries for {layers} layers", "list one type per layer")
    return tuple(given[:layers])


def _role(
    layer: int, ratios: tuple[int, ...], sources: tuple[int, ...], choosers: tuple[int, ...], proposer: int | None
) -> Role:
    """The role of one layer: what it reads comes from the nearest publisher at or below it."""
    ratio = ratios[layer]
    if not ratio:
        for key, listed in (("kv_source_layer_ids", sources), ("index_source_layer_ids", choosers)):
            if layer in listed:
                raise refusal(key, f"layer {layer} sees its window only (compress_ratios)")
        return Role(0, None, None, False, False, 0)
    source = max((i for i in sources if i <= layer), default=None)
    chooser = max((i for i in choosers if i <= layer), default=None)
    if source is None or ratios[source] != ratio:
        raise refusal("kv_source_layer_ids", f"layer {layer} has no source of ratio {ratio} at or below it")
    if chooser is None or chooser < source:
        raise refusal("index_source_layer_ids", f"layer {layer} has no selection over the entries of layer {source}")
    restricted = proposer is not None and 0 <= proposer < layer and chooser == layer
    if restricted and proposer is not None and proposer < source:
        raise refusal("candidate_source_layer_id", f"its blocks are not those of layer {layer}'s source {source}")
    place = [s for s in sources if ratios[s] == ratio].index(source)
    return Role(ratio, source, chooser, proposer == layer, restricted, place)

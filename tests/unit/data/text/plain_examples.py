"""The rules of examples once more, one example at a time in plain Python: the oracle of the fast version.

It shares no code with the package but the order of ``max_ngram`` lengths and the places where random
numbers are read, which are part of the rules: same seed, same examples, for ever.
"""

import math
from bisect import bisect_left, bisect_right
from itertools import accumulate, pairwise

MIN_TOKENS = 8
_BITS = (1 << 64) - 1


def draw(key, counter):
    z = (key + 0x9E3779B97F4A7C15 * (counter + 1)) & _BITS
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _BITS
    return z ^ (z >> 31)


def key_of(seed, *words):
    key = draw(seed & _BITS, 0)
    for word in words:
        key = draw(key, word)
    return key


def uniform(bits):
    return (bits >> 11) / 2**53


def below(bits, bound):
    return int(uniform(bits) * bound)


def find_window(documents, capacity, index):
    """Return (number of the document, number of the window, number of windows in the document)."""
    for number, document in enumerate(documents):
        length = sum(map(len, document))
        num_windows = math.ceil(length / capacity) if length >= MIN_TOKENS else 0
        if index < num_windows:
            return number, index, num_windows
        index -= num_windows
    raise IndexError


def segments(documents, config, epoch, index):
    """Return (first tokens, second tokens, label)."""
    capacity = config.max_seq_length - (2 if config.pairs == "none" else 3)
    number, window, num_windows = find_window(documents, capacity, index)
    document = documents[number]
    tokens = [token for sentence in document for token in sentence]
    starts = list(accumulate(map(len, document), initial=0))[:-1]
    spare = max(len(tokens) - capacity, 0)

    phase = uniform(key_of(config.seed, 2, epoch, number)) - 0.5
    place = round((window + phase) * spare / max(num_windows - 1, 1))
    place = min(max(place, 0), spare)
    start = starts[bisect_right(starts, place) - 1]
    if place - start > capacity // 2:
        start = place
    if spare and place == spare:
        following = bisect_left(starts, place)
        if following < len(starts) and 2 * (len(tokens) - starts[following]) >= capacity:
            start = starts[following]

    shape = draw(key_of(config.seed, 3, epoch, index), 0)
    length = min(len(tokens) - start, capacity)
    if uniform(draw(shape, 0)) < config.short_seq_prob:
        length = min(length, MIN_TOKENS + below(draw(shape, 1), capacity - MIN_TOKENS + 1))
    end = start + length
    if config.pairs == "none":
        return tokens[start:end], [], False
    inside = [s for s in starts if start < s < end]
    middle = inside[below(draw(shape, 2), len(inside))] if inside else start + length // 2
    label = uniform(draw(shape, 3)) < 0.5
    a, b = tokens[start:middle], tokens[middle:end]
    if config.pairs == "order":
        return (b, a, label) if label else (a, b, label)
    return a, elsewhere(documents, capacity, number, len(b), shape) if label else b, label


def elsewhere(documents, capacity, number, length, shape):
    """Return up to ``length`` tokens of a document other than ``number``."""
    others = [
        document
        for i, document in enumerate(documents)
        if i != number and sum(map(len, document)) >= MIN_TOKENS
    ]
    document = others[below(draw(shape, 4), len(others))]
    tokens = [token for sentence in document for token in sentence]
    starts = list(accumulate(map(len, document), initial=0))[:-1]
    place = below(draw(shape, 5), max(len(tokens) - length, 0) + 1)
    start = starts[bisect_right(starts, place) - 1]
    if place - start > capacity // 2:
        start = place
    return tokens[start : start + length]


def split_ngrams(key, num_words, segment_firsts, max_ngram):
    """Return lists of consecutive words (numbers)."""
    total = sum(1 / n for n in range(1, max_ngram + 1))
    begins = set(segment_firsts)
    word = j = 0
    while word < num_words:
        begins.add(word)
        u = uniform(draw(key, j))
        n = 1
        while n < max_ngram and u >= sum(1 / m for m in range(1, n + 1)) / total:
            n += 1
        word += n
        j += 1
    bounds = sorted(begins) + [num_words]
    return [list(range(a, b)) for a, b in pairwise(bounds)]


def choose(key, sizes, budget):
    """Take n-grams in random order, each that still fits; size 0 cannot be taken."""
    taken = set()
    for j in sorted((j for j, size in enumerate(sizes) if size), key=lambda j: (draw(key, j) >> 16, j)):
        if sizes[j] <= budget:
            taken.add(j)
            budget -= sizes[j]
    return taken


def example(documents, manifest, config, epoch, index):
    """Return the arrays of one example as lists."""
    first, second, label = segments(documents, config, epoch, index)
    ids, types = [manifest.cls_id, *first, manifest.sep_id], [0] * (len(first) + 2)
    if config.pairs != "none":
        ids, types = [*ids, *second, manifest.sep_id], types + [1] * (len(second) + 1)
    num_tokens = len(ids)
    padding = config.max_seq_length - num_tokens

    words, segment_firsts = [], []
    for offset, segment in ((1, first), (len(first) + 2, second)):
        if config.pairs == "none" and not segment:
            continue
        segment_firsts.append(len(words))
        for i, token in enumerate(segment):
            if i and config.whole_words and manifest.continues_word[token]:
                words[-1].append(offset + i)
            else:
                words.append([offset + i])
    key = key_of(config.seed, 3, epoch, index)
    ngrams = split_ngrams(draw(key, 1), len(words), segment_firsts, config.max_ngram)
    positions = [[p for w in ngram for p in words[w]] for ngram in ngrams]
    special = set(manifest.special_ids)
    sizes = [0 if any(ids[p] in special for p in places) else len(places) for places in positions]
    budget = min(max(round(num_tokens * config.mask_prob), 1), config.max_predictions_per_seq)
    taken = choose(draw(key, 2), sizes, budget)

    masked = sorted(p for j in taken for p in positions[j])
    targets = [ids[p] for p in masked]
    ordinary = [i for i in range(manifest.vocab_size) if i not in special]
    for p in masked:
        place_key = draw(draw(key, 3), p)
        u = uniform(draw(place_key, 0))
        if u < 0.8:
            ids[p] = manifest.mask_id
        elif u < 0.9:
            ids[p] = ordinary[below(draw(place_key, 1), len(ordinary))]
    empty = [0] * (config.max_predictions_per_seq - len(masked))
    return {
        "input_ids": ids + [manifest.pad_id] * padding,
        "token_type_ids": types + [0] * padding,
        "attention_mask": [1] * num_tokens + [0] * padding,
        "masked_positions": masked + empty,
        "masked_ids": targets + empty,
        "masked_weights": [1.0] * len(masked) + [0.0] * len(empty),
        "labels": int(label),
        "epoch": epoch,
        "index": index,
    }

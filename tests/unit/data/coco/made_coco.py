"""Made ground truths and results: random boxes and masks of every form, with equal scores and crowds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from pycocotools import mask as official

CATEGORIES = {3: "hen", 7: "fox", 8: "egg"}


def made_truth(seed: int, num_images: int = 12) -> dict[str, Any]:
    """Objects as polygons and as run lengths of both forms; some crowds; the last image has no object."""
    random = np.random.default_rng(seed)
    images = [
        {"id": 100 - 3 * n, "file_name": f"{n}.jpg", "width": 60 + n, "height": 50} for n in range(num_images)
    ]
    annotations = []
    for image in images[:-1]:
        for _ in range(random.integers(1, 9)):
            width, height = image["width"], image["height"]
            x, y = random.uniform(0, width - 12), random.uniform(0, height - 12)
            w, h = random.uniform(2, width - x), random.uniform(2, height - y)
            crowd = int(random.random() < 0.15)
            polygon = [x, y, x + w, y, x + 0.7 * w, y + h, x, y + h]
            rle = official.merge(official.frPyObjects([polygon], height, width))
            rle["counts"] = rle["counts"].decode()
            segmentation: Any = [polygon] if random.random() < 0.6 else rle
            if crowd:
                bits = official.decode(rle).reshape(-1, order="F")
                edges = np.flatnonzero(np.diff(bits, prepend=0, append=1 - bits[-1]))
                counts = np.diff(edges, prepend=0).tolist()
                segmentation = {"size": [height, width], "counts": counts}
            annotations.append(
                {
                    "id": 40 + len(annotations),
                    "image_id": image["id"],
                    "category_id": int(random.choice(list(CATEGORIES))),
                    "bbox": [x, y, w, h],
                    "area": float(official.area(rle)) * random.choice([1, 5, 40]),
                    "iscrowd": crowd,
                    "segmentation": segmentation,
                }
            )
    categories = [{"id": number, "name": name} for number, name in reversed(CATEGORIES.items())]
    return {"info": {}, "images": images, "annotations": annotations, "categories": categories}


def made_results(truth: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    """Objects shifted a little, some of another category or out of nowhere; scores in steps of 0.1."""
    random = np.random.default_rng(seed)
    sizes = {image["id"]: (image["height"], image["width"]) for image in truth["images"]}
    results = []
    for one in [*truth["annotations"], *truth["annotations"]]:
        height, width = sizes[one["image_id"]]
        x, y, w, h = np.array(one["bbox"]) + random.normal(0, 1.5, 4)
        w, h = max(w, 1), max(h, 1)
        rle = official.frPyObjects([[x, y, x + w, y, x + w, y + h, x, y + h]], height, width)[0]
        category = one["category_id"] if random.random() < 0.8 else int(random.choice(list(CATEGORIES)))
        results.append(
            {
                "image_id": one["image_id"],
                "category_id": category,
                "score": round(float(random.random()), 1),
                "bbox": [float(v) for v in (x, y, w, h)],
                "segmentation": {"size": [height, width], "counts": rle["counts"].decode()},
            }
        )
    order = random.permutation(len(results))
    return [results[k] for k in order]


def write(path: Path, tree: Any) -> Path:
    path.write_text(json.dumps(tree), encoding="utf-8")
    return path

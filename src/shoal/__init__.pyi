from shoal.comm.engine import EngineOptions as EngineOptions
from shoal.comm.hooks import EightBitWire as EightBitWire
from shoal.comm.hooks import bf16_wire as bf16_wire
from shoal.comm.priority import prioritize as prioritize
from shoal.data.images.reader import ImageReader as ImageReader
from shoal.data.images.shards import ImageShards as ImageShards
from shoal.data.text.examples import ExampleReader as ExampleReader
from shoal.data.text.shards import TextShards as TextShards
from shoal.data.text.span_corruption import SpanReader as SpanReader
from shoal.optim.lamb import Lamb as Lamb
from shoal.optim.lans import Lans as Lans
from shoal.optim.lars import Lars as Lars
from shoal.optim.novograd import Novograd as Novograd
from shoal.pipelining.api import make_mesh as make_mesh
from shoal.pipelining.api import pipeline as pipeline
from shoal.recipes.workloads import plan as plan
from shoal.train.checkpoint import Checkpointer as Checkpointer
from shoal.train.run import Run as Run

__version__: str

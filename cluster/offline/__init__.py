"""The engine from Python, without a server."""

from airside.cluster.offline.llm import LLM as LLM
from airside.cluster.offline.outputs import Completion as Completion
from airside.cluster.offline.outputs import RequestOutput as RequestOutput
from airside.cluster.offline.outputs import Score as Score
from airside.cluster.offline.session import OfflineError as OfflineError
from airside.cluster.sampling_params import SamplingParams as SamplingParams

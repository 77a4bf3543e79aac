from ampacity.frames import Run as Run
from ampacity.frames import load as load
from ampacity.notebook import CommandError as CommandError
from ampacity.notebook import compare as compare
from ampacity.notebook import predict as predict
from ampacity.notebook import sweep as sweep

__version__: str

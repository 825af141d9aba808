"""The bundle: goldens and runs as one checked HDF5 file. docs/bundle.md describes the format."""

from kdtr_cli.bundle.reader import Bundle, BundleSequence, open_bundle
from kdtr_cli.bundle.schema import SequenceData
from kdtr_cli.bundle.target import check_target
from kdtr_cli.bundle.writer import BundleWriter

__all__ = ["Bundle", "BundleSequence", "BundleWriter", "SequenceData", "check_target", "open_bundle"]

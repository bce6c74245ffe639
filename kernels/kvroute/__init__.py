"""What runs inside vLLM: the route switch, its evidence, what the CPU lacks, and the faults.

``kvroute`` is a ``vllm.general_plugins`` entry point. vLLM loads it in the API server, in the
engine core and in every worker; without one of the variables of ``kvroute.settings`` it returns
at once, and vLLM stays as it is. Importing the package imports neither torch nor vLLM.
"""

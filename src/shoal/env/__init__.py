"""Environment variables. No other package reads them; a test checks it. The standard library only.

1. :mod:`variables` reads and sets them.
2. :mod:`worker` has the ranks and the rendezvous of a worker. Each launcher has a module that reads them from
   its variables: :mod:`torchrun`, which Kubeflow's pods have too, :mod:`slurm`, :mod:`mpi`.
3. :mod:`launcher` detects which launcher has started the process.
4. :mod:`sagemaker` has the variables of SageMaker's training jobs, and :mod:`secret` the job's secret.
5. :mod:`settings` has shoal's own variables; :mod:`machine` counts cores and GPUs, finds compilers and
   identifies the host.
"""

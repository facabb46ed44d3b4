"""Runs the stages of a job on the control worker and tells the driver how it goes.

Who does what when runs share a cluster or a job. The driver (:mod:`trinity_dask.run.joining`)
enters its run on the Dask scheduler, under a lock, and so gets engine slots that no other run
has; ``cluster/claims.py`` then gives those slots to workers that have none. On the control worker
``job_lock.py`` says who may write the job's directory at a time, and ``meeting.py`` brings the
trainer and the explorers of one job together: the parts they share, and how each of them ended
(``status.End``). Nothing of this is needed by a run that has its cluster for itself but the lock.
"""

"""The ways a command ends badly.

Everything else that escapes is a defect of ours and keeps its traceback.
"""


class UserError(Exception):
    """What was asked cannot be done: one line saying what is wrong, where, and what to do. Exit status 2."""


class RunFailed(Exception):
    """A run that had started could not go on; the line says where its log and last good checkpoint are. Exit status 1."""


class PeerLost(RunFailed):
    """A run that could not go on because another rank or its host was lost: started again it may. Exit status LOST."""


# EX_TEMPFAIL of sysexits.h: what schedulers and scripts take as "try again".
EXIT_PEER_LOST = 75

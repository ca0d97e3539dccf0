"""Default timeouts and polling intervals, in seconds, of every wait that no flag sets.

docs/deadlines.md lists who waits for whom and what happens when a timeout expires. A constant's
name begins with the name of the module that reads it.
"""

# -- agents/programs.py
PROGRAMS_END = 10.0

# -- agents/server.py
ENDPOINT_BODY = 60.0
ENDPOINT_PING = 15.0
#: longer than clients keep connections that they do not use
ENDPOINT_IDLE = 120.0

# -- checkpoints/saving.py
#: How long the ranks wait for the slowest one's disk. Not --distributed-timeout-minutes, which is
#: for ranks that compute: a file system that is shared with others may take an hour for what it
#: takes minutes for on another day.
CHECKPOINT_WRITE = 7200.0
#: for the group's own error, which says more
CHECKPOINT_GRACE = 60.0

# -- cli/chat.py
#: Seconds until the next piece of an answer, at most.
CHAT_PIECE = 300.0

# -- cli/model_source.py
#: Hundreds of gigabytes on a network file system take an hour.
MODEL_SOURCE_CONVERT = 7200.0

# -- cli/serve.py
SERVE_LOOK = 0.5

# -- cli/watch.py
#: For answers that are under way when the server ends.
WATCH_GOODBYE = 0.5

# -- cluster/command_inbox.py
#: two changes within one tick of a file system's clock look like one
COMMAND_INBOX_SETTLED = 2.0
COMMAND_INBOX_WAIT = 120.0
COMMAND_INBOX_POLL = 0.1

# -- cluster/engine_actor.py
ENGINE_ACTOR_DYING = 1.0

# -- cluster/engine_fit.py
ENGINE_FIT = 10.0

# -- cluster/engines.py
ENGINES_ASK = 10.0
ENGINES_AT_HAND = 60.0
ENGINES_LOOK = 0.25
#: How long the death may take that explains a failure: connections may break before the process is
#: gone.
ENGINES_DEATH = 1.0
ENGINES_DEATH_OF_CONNECTION = 3.0

# -- cluster/external_engines.py
#: an abort is done at once; whatever is still on its way is finished there
EXTERNAL_ENGINES_DRAIN = 10.0
EXTERNAL_ENGINES_DRAIN_POLL = 0.1
EXTERNAL_ENGINES_ASK = 2.0
EXTERNAL_ENGINES_TRY_AGAIN = 10.0
LIVENESS_ASK = 2.0
LIVENESS_ANSWER = 5.0

# -- cluster/gpu_memory.py
GPU_MEMORY_MEMORY = (
    300.0  # a copy of the weights to the host or back, and the end of the last requests
)
GPU_MEMORY_IDLE = (
    3.0  # for requests that were aborted to end; a rollout that was given up still sends some
)

# -- cluster/ray_session.py
#: Seconds in which a cluster must let a driver join.
RAY_SESSION_JOIN = 20.0
RAY_SESSION_LOOK = 0.1
#: For the kernel to end a tree of processes.
RAY_SESSION_KILLED = 6.0
#: For a raylet to register, which waits for its agents; each of them imports Ray.
RAY_SESSION_START = 120.0

# -- cluster/routers.py
#: to take a worker out; generation is waited for meanwhile
ROUTERS_REMOVE = 10.0
ROUTERS_JOIN = 60.0
ROUTERS_ACCEPT = 15.0
ROUTERS_START = 120.0
ROUTERS_AT_HAND = 60.0

# -- cluster/run_cluster.py
#: for all processes together
RUN_CLUSTER_POLITE = 5.0
RUN_CLUSTER_HASTY = 2.0

# -- cluster/server_process.py
#: after SIGKILL: the kernel may have much memory to free
SERVER_PROCESS_KILLED = 10.0

# -- cluster/slow_waits.py
#: Until the first line, and between two where somebody is stopped or idle; else they come at
#: growing intervals.
SLOW_WAITS_QUIET = 60.0
#: Of silence, after which those who are waited for are asked for their stacks, though they seem to
#: work.
SLOW_WAITS_STACKS = 240.0

# -- cluster/stopped_processes.py
#: Until the first line about a part that is stopped; earlier where the limit is short.
STOPPED_PROCESSES_SAID = 30.0
#: Looking takes milliseconds, and nothing here is in a hurry.
STOPPED_PROCESSES_LOOK = 5.0
#: For the main thread, to take the error up and leave.
STOPPED_PROCESSES_HEARS = 15.0
#: For a wait of ours, to take it up by itself: Ray makes a SystemError of what a handler raises
#: within a call into it.
STOPPED_PROCESSES_TAKES_UP = 3.0

# -- cluster/trainer_group.py
TRAINER_GROUP_START = 180.0
#: for what a process has at hand
TRAINER_GROUP_AT_HAND = 120.0

# -- cluster/waiting.py
# between two looks at what no answer tells: SIGTERM, who has died; an answer ends a wait at once
WAITING_POLL = 0.5
WAITING_CAUSE = 3.0
WAITING_FIRST_NEWS = 45.0
WAITING_PING = 5.0

# -- diagnosis/align/engines.py
#: Until an engine has scored one request; the first compiles kernels.
ALIGN_ENGINES = 300.0

# -- diagnosis/checks_data.py
#: A reward that takes longer for one sample is not waited for here.
CHECKS_DATA = 5.0
#: Nor one that takes longer for all of them.
CHECKS_DATA_ALL = 20.0

# -- diagnosis/checks_host.py
CHECKS_HOST_TORCH = 60.0

# -- diagnosis/one_round.py
#: Of the whole round; the first start of SGLang takes minutes.
ONE_ROUND_ROUND = 1800.0
#: After SIGTERM, until it is killed.
ONE_ROUND_END = 30.0

# -- embedded/command.py
EMBEDDED_STARTUP = 300.0

# -- embedded/control_routes.py
CONTROL_ROUTES_ORDER = (
    120.0  # seconds until the engine thread must have taken an order up: a step, at most
)

# -- embedded/engine.py
#: seconds; a missed wake-up costs at most this
EMBEDDED_ENGINE_IDLE_WAIT = 1.0
EMBEDDED_ENGINE_STOP = 5.0

# -- embedded/generate_routes.py
GENERATE_ROUTES_HEALTH = 20.0

# -- embedded/server.py
EMBEDDED_SWITCH_INTERVAL = (
    0.0002  # seconds; how long the engine thread waits for the interpreter after each kernel
)
EMBEDDED_GOODBYE = 0.5
EMBEDDED_ANSWERS = 2.0

# -- embedded/weight_update.py
#: seconds to wait for the engine thread and the copy
WEIGHT_UPDATE_COPY = 300.0
WEIGHT_UPDATE_JOIN = 120.0
WEIGHT_UPDATE_RECEIVE = 300.0

# -- engines/api.py
#: where a call says nothing else
ENGINE_API_ANSWER = 60.0
#: at an engine that comes up
ENGINE_API_LOOK = 5.0

# -- engines/client.py
CLIENT_LOOK = 1.0
CLIENT_ABORT = 10.0
CLIENT_LOADS = 5.0

# -- engines/fleet.py
#: For the thread of the event loop, beyond what its requests may take: it is this process's own.
FLEET_LOOP = 10.0

# -- engines/health.py
HEALTH_ASK_AGAIN = 0.1
HEALTH_LOOK = 0.5
HEALTH_ARRIVED = (
    0.2  # after which a question has reached the engine, and is among what it must end to be idle
)
HEALTH_IDLE = 1.0

# -- engines/router.py
ROUTER_STARTUP = 60.0

# -- engines/sglang/command.py
#: A model of hundreds of gigabytes on a cold disk; 126 s were seen for a small one, most of it
#: graph capture.
SGLANG_STARTUP = 1800.0
#: One answer of it: it generates a token, the very first of the server, and sleeps a second
#: meanwhile.
SGLANG_HEALTH = 30.0

# -- engines/sglang/weight_probe.py
WEIGHT_PROBE_STORE = 60.0

# -- engines/wire/process_group.py
PROCESS_GROUP_LEAVE = 10.0

# -- engines/workers.py
#: Seconds in which the router says which workers it has: generation has hours, this must not hang
#: with it.
WORKERS_LIST = 30.0

# -- environments/openenv.py
OPENENV_CONNECT = 30.0

# -- hub.py
#: Seconds for the hub's first answer; of later ones huggingface_hub takes care
#: (HF_HUB_DOWNLOAD_TIMEOUT).
HUB_FIRST_ANSWER = 10.0

# -- memory/hardware.py
HARDWARE_QUERY = 20.0

# -- observe/run_folder.py
RUN_FOLDER_READERS = 0.5

# -- page/report.py
#: Seconds from one report of a running run to the next, at least; and its cost may be this share of
#: the time.
REPORT_INTERVAL = 10.0

# -- page/server.py
#: Between looks at the run folders.
PAGE_LOOK = 2.0

# -- processes/owner.py
OWNER_LEAVE = 5.0
OWNER_HURRY = 2.0

# -- processes/pinned_memory.py
#: for one buffer, at most
PINNED_MEMORY_LOCK = 300.0

# -- processes/stacks.py
STACKS_WRITTEN = 0.5


# -- rollout/dynamic_sampling.py
DYNAMIC_SAMPLING_ABORT = 60.0
#: For the runner's own code to end; users' has less (`slime.user_code.calls`).
DYNAMIC_SAMPLING_CANCEL = 10.0

# -- rollout/journal.py
JOURNAL_SYNC = 1.0

# -- rollout/loop.py
LOOP_LOAD_INTERVAL = 2.0
#: How long a failing request is sent again, by --use-fault-tolerance.
LOOP_RETRY = {False: 60.0, True: 600.0}

# -- rollout/rewards/grading_pool.py
GRADING_POOL_START = 60.0
GRADING_POOL_LEAVE = 1.0
GRADING_POOL_KILLED = 10.0

# -- rollout/rewards/pool.py
#: Seconds that comparing two expressions may take; answers that need more are not what was asked
#: for.
POOL_MATH = 5.0

# -- rollout/watchdog.py
#: Two looks that are so far apart, beyond twice their interval, were kept apart by something.
WATCHDOG_LATE = 1.0
#: After so long `Watchdog.words` tell who waits; the driver says them when nothing has been heard
#: for a minute.
WATCHDOG_WORDS = 30.0

# -- run/api.py
#: A driver that was told to end saves first; one that cannot is killed.
RUN_API_STOP = 600.0

# -- run/preflight.py
PREFLIGHT_CONNECT = 5.0

# -- run/saving.py
#: How long a run that failed waits for the checkpoint that is being written; the processes may be
#: in any state.
RUN_SAVING_SETTLE = 600.0
#: Without --save-interval: a step may take minutes, and a tenth of the run half a day.
RUN_SAVING_AGAIN = 1800.0

# -- run/session.py
#: Of all processes together, and of Ray; kill signals of schedulers come half a minute after
#: SIGTERM.
RUN_SESSION_CLOSE = 9.0
#: More than that an evaluation under way does not hold up a run that was asked to stop and has
#: saved.
RUN_SESSION_EVALUATION = 5.0

# -- run/stopping.py
#: From the first signal, for an end that goes its way; kill signals of schedulers come half a
#: minute after SIGTERM.
STOPPING_BLOCKED = 10.0
STOPPING_LOOK = 0.5

# -- sandbox/sandbox.py
#: How much later than the program's own limit the keeper must have ended all of it.
SANDBOX_GRACE = 15.0
SANDBOX_END = 10.0

# -- user_code/calls.py
USER_CALLS_LOOK = 1.0
#: From its cancellation, or from the exception raised in it, until a call is left behind.
USER_CALLS_LEAVE = 5.0
#: Until a thread is ended that nobody waits for any more, where its call had no deadline.
USER_CALLS_PATIENCE = 60.0
#: Until the first line about a blocked loop; each further one after twice the time.
USER_CALLS_BLOCKED = 20.0

# -- weights/canary.py
#: an idle engine answers at once, or compiles a kernel first
CANARY = 120.0

# -- weights/distributed.py
DISTRIBUTED_JOIN = 120.0
DISTRIBUTED_LEAVE = 10.0
#: for an engine's own words on why its member of the group is gone
DISTRIBUTED_GRACE = 2.0

# -- weights/engine_check.py
ENGINE_CHECK_ANSWER = 120.0

# -- weights/route.py
#: for what an engine has at hand
ROUTE_INFO = 30.0

# -- weights/sync.py
#: pausing waits for the forward pass under way, nothing longer
SYNC_CONTROL = 120.0

# -- weights/transport.py
TRANSPORT_FLOOR = 120.0

"""Default timeouts and polling intervals, in seconds, of every wait that no flag sets.

docs/deadlines.md lists what waits for what, and what happens when a timeout expires. A section has
the constants of one file.
"""

from __future__ import annotations

# -- agents/programs.py
PROGRAMS_TERMINATE = 10.0

# -- agents/server.py
ENDPOINT_REQUEST_BODY = 60.0
ENDPOINT_STREAM_PING = 15.0
#: Longer than clients keep idle connections open.
ENDPOINT_KEEPALIVE = 120.0

# -- checkpoints/saving.py
#: How long the ranks wait for the slowest one's disk. --distributed-timeout-minutes, which is for
#: computation, would be too short: a save of minutes may take an hour on a shared file system.
CHECKPOINT_WRITE = 7200.0
#: Added to CHECKPOINT_WRITE, so that the process group's own, more detailed error comes first.
CHECKPOINT_GRACE = 60.0

# -- cli/chat.py
#: Between two pieces of a streamed answer.
CHAT_NEXT_PIECE = 300.0

# -- cli/model_source.py
#: Hundreds of gigabytes on a network file system take an hour.
MODEL_SOURCE_CONVERT = 7200.0

# -- cli/serve.py
SERVE_POLL = 0.5

# -- cli/watch.py
#: For responses in progress when the server ends.
WATCH_SHUTDOWN = 0.5

# -- cluster/command_inbox.py
#: A folder that changed this recently is read again: a second change within one tick of the file
#: system's clock does not change the folder's modification time.
COMMAND_INBOX_REREAD = 2.0
COMMAND_INBOX_ANSWER = 120.0
COMMAND_INBOX_POLL = 0.1

# -- cluster/engine_actor.py
#: For a router to end, after a request to it failed.
ENGINE_ACTOR_ROUTER_EXIT = 1.0

# -- cluster/engine_fit.py
ENGINE_FIT_ANSWER = 10.0

# -- cluster/engines.py
ENGINES_ANSWER = 10.0
#: For a call of an engine actor that is quick, or only ends a server.
ENGINES_ACTOR_CALL = 60.0
ENGINES_POLL = 0.25
#: To find a process dead after an error that its death would explain.
ENGINES_DEATH_AFTER_ERROR = 1.0
#: The same after a broken connection, which may come before the process has ended.
ENGINES_DEATH_AFTER_DISCONNECT = 3.0

# -- cluster/external_engines.py
#: Engines abort at once; requests that are still on their way to the engine are finished there.
EXTERNAL_ENGINES_DRAIN = 10.0
EXTERNAL_ENGINES_DRAIN_POLL = 0.1
EXTERNAL_ENGINES_LOADS = 2.0
#: Between attempts to have the router remove a lost engine.
EXTERNAL_ENGINES_REMOVE_RETRY = 10.0
#: Between two health checks of an engine.
EXTERNAL_ENGINES_LIVENESS_POLL = 2.0
EXTERNAL_ENGINES_LIVENESS_ANSWER = 5.0

# -- cluster/gpu_memory.py
#: To copy the weights to the host or back, after the last requests have ended.
GPU_MEMORY_MOVE = 300.0
#: For aborted requests to end; a rollout that was cancelled still sends some.
GPU_MEMORY_IDLE = 3.0

# -- cluster/ray_session.py
#: For an agent that nobody has asked to look whether the raylet is still there.
RAY_SESSION_AGENT_POLL = 1.0
#: For a driver to join a cluster; includes the import of Ray in the process that tries it.
RAY_SESSION_JOIN = 40.0
RAY_SESSION_JOIN_POLL = 0.1
#: For the kernel to end a tree of processes.
RAY_SESSION_KILL = 6.0
#: For a raylet to register, which waits for its agents; each of them imports Ray.
RAY_SESSION_START = 120.0

# -- cluster/routers.py
#: Short, because generation waits while a worker is removed.
ROUTERS_REMOVE_WORKER = 10.0
ROUTERS_ADD_WORKER = 60.0
#: For each engine of a router that was restarted.
ROUTERS_ADD_WORKER_AGAIN = 15.0
ROUTERS_START = 120.0
#: For a call of an engine actor that is quick, or only ends a router.
ROUTERS_ACTOR_CALL = 60.0

# -- cluster/run_cluster.py
#: For all processes to end by themselves, after a run that finished.
RUN_CLUSTER_EXIT = 5.0
#: The same after a failure or a stop.
RUN_CLUSTER_EXIT_AFTER_FAILURE = 2.0

#: For engines to start their profiler, or to write what it recorded.
RUN_CLUSTER_PROFILE = 600.0

# -- cluster/server_process.py
#: After SIGKILL: the kernel may have much memory to free.
SERVER_PROCESS_KILL = 10.0

# -- cluster/slow_waits.py
#: Until the first line about a wait, and between two lines where a process is stopped or idle;
#: otherwise lines come at growing intervals.
SLOW_WAITS_LINE = 60.0
#: After this long without an answer, processes that seem to work are asked for their stacks too.
SLOW_WAITS_STACKS = 240.0

# -- cluster/stopped_processes.py
#: Until the first line about a stopped process; earlier where the limit is short.
STOPPED_PROCESSES_LINE = 30.0
#: A search takes milliseconds; it need not be frequent.
STOPPED_PROCESSES_POLL = 5.0
#: For the main thread to raise the error and leave.
STOPPED_PROCESSES_EXIT = 15.0
#: For one of our own waits to raise the error. After that a signal handler raises it, which Ray
#: turns into a SystemError if the main thread is in a call into Ray.
STOPPED_PROCESSES_RAISE = 3.0

# -- cluster/trainer_group.py
TRAINER_GROUP_START = 180.0
#: For a quick call of a trainer rank.
TRAINER_GROUP_QUICK_CALL = 120.0
#: To start the profiler, or to write what it recorded: gigabytes where steps are large.
TRAINER_GROUP_PROFILE = 600.0
#: For the critic's other ranks to finish writing, after one of them has died.
TRAINER_GROUP_CRITIC_PART = 60.0

# -- cluster/waiting.py
#: How often a wait looks for SIGTERM and dead processes; an answer ends a wait at once.
WAITING_POLL = 0.5
#: To wait for another rank's failure that explains a broken connection.
WAITING_CAUSE = 3.0
WAITING_FIRST_LINE = 45.0
WAITING_PING = 5.0

# -- diagnosis/align/engines.py
#: Until an engine has scored one request; the first compiles kernels.
ALIGN_ENGINES_ANSWER = 300.0

# -- diagnosis/checks_data.py
#: For the reward of one sample.
CHECKS_DATA_REWARD = 5.0
#: For the rewards of all samples.
CHECKS_DATA_ALL_REWARDS = 20.0

# -- diagnosis/checks_host.py
CHECKS_HOST_TORCH = 60.0

# -- diagnosis/one_round.py
#: For the whole round; the first start of SGLang takes minutes.
ONE_ROUND_RUN = 1800.0
#: From SIGTERM to SIGKILL.
ONE_ROUND_EXIT = 30.0

# -- embedded/kind.py
EMBEDDED_STARTUP = 300.0

# -- embedded/control_routes.py
#: For the engine thread to start a command, which may have to wait for a step.
CONTROL_ROUTES_COMMAND = 120.0

# -- embedded/engine.py
#: Longest delay after a missed wake-up.
EMBEDDED_ENGINE_WAKE = 1.0
EMBEDDED_ENGINE_STOP = 5.0

# -- embedded/generate_routes.py
GENERATE_ROUTES_HEALTH = 20.0

# -- embedded/server.py
#: How long the engine thread waits for the interpreter after each kernel.
EMBEDDED_SWITCH_INTERVAL = 0.0002
#: For requests to end when the server leaves.
EMBEDDED_FINISH_REQUESTS = 0.5
#: For answers to be sent when the server leaves.
EMBEDDED_SEND_ANSWERS = 2.0

# -- embedded/weight_update.py
#: For the engine thread to start and finish the copy.
WEIGHT_UPDATE_COPY = 300.0
WEIGHT_UPDATE_JOIN = 120.0
WEIGHT_UPDATE_RECEIVE = 300.0

# -- engines/api.py
#: For calls that give no timeout.
ENGINE_API_ANSWER = 60.0

# -- engines/client.py
CLIENT_WORKERS = 1.0
CLIENT_ABORT = 10.0
CLIENT_LOADS = 5.0

# -- engines/fleet.py
#: Added to the timeout of the requests, for the event loop of this process.
FLEET_LOOP = 10.0

# -- engines/health.py
HEALTH_RETRY = 0.1
HEALTH_POLL = 0.5
#: For a request to reach the engine, which is not idle before the request has ended.
HEALTH_ARRIVAL = 0.2
HEALTH_FLUSH = 1.0

# -- engines/router.py
ROUTER_STARTUP = 60.0

# -- engines/sglang/command.py
#: A model of hundreds of gigabytes may be on a cold disk. A small model took up to 126 s, most of
#: it to capture CUDA graphs.
SGLANG_STARTUP = 1800.0
#: For one health check: SGLang generates a token, possibly its first, and sleeps for a second.
SGLANG_HEALTH = 30.0

# -- engines/sglang/weight_probe.py
WEIGHT_PROBE_STORE = 60.0

# -- engines/wire/process_group.py
PROCESS_GROUP_LEAVE = 10.0

# -- engines/workers.py
#: For the router's list of its workers; a request for generation may take hours.
WORKERS_LIST = 30.0

# -- environments/openenv.py
OPENENV_CONNECT = 30.0

# -- hub.py
#: For the hub's first answer; later answers have huggingface_hub's own timeout
#: (HF_HUB_DOWNLOAD_TIMEOUT).
HUB_FIRST_ANSWER = 10.0
#: An image that a row names by its URL (--allow-image-urls).
IMAGE_DOWNLOAD = 30.0

# -- memory/hardware.py
HARDWARE_QUERY = 20.0

# -- observe/run_folder.py
#: For readers that test a run folder's lock for an instant.
RUN_FOLDER_LOCK = 0.5

# -- page/report.py
#: Shortest time between two reports of a running run; slow reports are written less often.
REPORT_INTERVAL = 10.0

# -- page/server.py
PAGE_POLL = 2.0

# -- processes/owner.py
#: For a server to end cleanly when its parent process has ended.
OWNER_SERVER_EXIT = 5.0
#: To finish the shutdown of a run after another Ctrl-C.
OWNER_HURRIED_EXIT = 2.0

# -- processes/pinned_memory.py
#: For one buffer.
PINNED_MEMORY_LOCK = 300.0

# -- processes/stacks.py
STACKS_DUMP = 0.5

# -- rollout/dynamic_sampling.py
DYNAMIC_SAMPLING_ABORT = 60.0
#: For the runner's own tasks to end; users' functions have less (USER_CALLS_CANCEL).
DYNAMIC_SAMPLING_CANCEL = 10.0

# -- rollout/journal.py
JOURNAL_SYNC = 1.0

# -- rollout/loop.py
LOOP_LOAD_INTERVAL = 2.0
#: How long a failing request is retried, for each value of --use-fault-tolerance.
LOOP_RETRY = {False: 60.0, True: 600.0}

# -- rollout/rewards/grading_pool.py
GRADING_POOL_START = 60.0
GRADING_POOL_EXIT = 1.0
GRADING_POOL_KILL = 10.0

# -- rollout/rewards/pool.py
#: To compare two mathematical expressions; an answer that takes longer counts as wrong.
POOL_MATH = 5.0

# -- rollout/watchdog.py
#: If two checks are this much further apart than twice their interval, the event loop was blocked.
WATCHDOG_BLOCKED = 1.0
#: After this long without progress `Watchdog.words` say what waits; the driver logs them after a
#: minute without news.
WATCHDOG_WORDS = 30.0

# -- run/api.py
#: For a driver to save and leave after SIGTERM, until it is killed.
RUN_API_STOP = 600.0

# -- run/preflight.py
PREFLIGHT_CONNECT = 5.0

# -- run/saving.py
#: How long a failed run waits for the checkpoint that is being written. It may never be finished,
#: because the processes may be in any state.
RUN_SAVING_ASYNC_SAVE = 600.0
#: Longest time between two checkpoints without --save-interval.
RUN_SAVING_EVERY = 1800.0

# -- run/session.py
#: For all processes and Ray to end; schedulers send SIGKILL half a minute after SIGTERM.
RUN_SESSION_CLOSE = 9.0
#: For an evaluation in progress after a run that was asked to stop has saved.
RUN_SESSION_EVALUATION = 5.0

# -- run/stopping.py
#: From the first signal to a forced exit; schedulers send SIGKILL half a minute after SIGTERM.
STOPPING_FORCED_EXIT = 10.0
STOPPING_POLL = 0.5

# -- sandbox/sandbox.py
#: Added to the program's limit: by then the supervisor must have ended all its processes.
SANDBOX_GRACE = 15.0
SANDBOX_TERMINATE = 10.0

# -- user_code/calls.py
USER_CALLS_POLL = 1.0
#: From the cancellation of a call, or the exception raised in it, until it is abandoned.
USER_CALLS_CANCEL = 5.0
#: Until an abandoned thread is ended, if its call had no deadline.
USER_CALLS_ABANDONED = 60.0
#: Until the first line about a blocked event loop; the interval doubles after each line.
USER_CALLS_BLOCKED = 20.0

# -- cluster/weight_push.py
#: No request uses the adapter any more, so the engine has nothing to wait for.
ADAPTER_UNLOAD = 60.0

# -- weights/canary.py
#: An idle engine answers at once, or compiles a kernel first.
CANARY_SCORE = 120.0

# -- weights/distributed.py
DISTRIBUTED_JOIN = 120.0
DISTRIBUTED_LEAVE = 10.0
#: For an engine's own message about a broken group.
DISTRIBUTED_GRACE = 2.0

# -- weights/engine_check.py
ENGINE_CHECK_ANSWER = 120.0

# -- weights/route.py
#: For ``/server_info``, which is quick.
ROUTE_INFO = 30.0

# -- weights/sync.py
#: To pause an engine, which waits only for the current forward pass.
SYNC_CONTROL = 120.0

# -- weights/transport.py
TRANSPORT_FLOOR = 120.0

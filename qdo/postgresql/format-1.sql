-- The tables of PostgreSQL in format 1; `schema.py` explains them. `qdo admin broker init` runs this with
-- the name of the schema and the seconds of a partition, or only the formats that are missing, and then
-- `functions.sql`. The text of a released format stays as it is, because databases of users have it. A
-- change is a file `format-N.sql`, which also drops each function, if it exists, that gets other
-- parameters or another result; `FORMAT` and `OLDEST_CLIENT` in `schema.py` tell which versions can use
-- the result.

CREATE SCHEMA IF NOT EXISTS {schema};
-- The owner of a schema may replace its functions, which run with the rights of their owners.
DO $$
DECLARE
    stranger text := (SELECT pg_get_userbyid(nspowner) FROM pg_namespace
        WHERE nspname = '{schema}' AND pg_get_userbyid(nspowner) <> current_user);
BEGIN
    IF stranger IS NOT NULL THEN
        RAISE EXCEPTION 'schema {schema} must belong to %, got %', current_user, stranger
            USING ERRCODE = 'QD003', DETAIL = stranger, HINT = 'Drop it, or run this as its owner.';
    END IF;
END
$$;
REVOKE ALL ON SCHEMA {schema} FROM PUBLIC;

-- `oldest` is the oldest format whose versions of qdo can use this schema. `tables` and `functions` are
-- digests of the texts that made them.
CREATE TABLE {schema}.about (
    id integer PRIMARY KEY DEFAULT 1 CHECK (id = 1),
    format integer NOT NULL,
    oldest integer NOT NULL,
    tables text NOT NULL,
    functions text NOT NULL,
    node bigint NOT NULL,
    partition_ticks bigint NOT NULL CHECK (partition_ticks > 0)
);

-- Its row is locked while one call creates many queues of the app, and by the one of several
-- transactions of the app that notifies. `fleet` names the fleet whose coordinator has the positions of
-- the app: the creation of the app's node `root`, and the coordinator.
CREATE TABLE {schema}.apps (
    name text PRIMARY KEY CHECK (length(name) <= 200),
    max_queues integer NOT NULL DEFAULT 100000,
    fleet text CHECK (length(fleet) <= 200),
    root text COLLATE "C" CHECK (octet_length(root) <= 65536)
);

-- The limits of sizes in this file are those of `app.send`, which other programs could pass by. `root`
-- is the id of the first queue of a shard's stream, NULL for other queues.
CREATE TABLE {schema}.queues (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    app text NOT NULL,
    name text NOT NULL CONSTRAINT queue_name CHECK (
        length(name) <= 200 AND name NOT IN ('.', '..', 'zookeeper')
        AND name ~ '^[^/\u0001-\u001f\u007f-\u009f\ue000-\uf8ff\ufff0-\U0010ffff]+$'),
    trimmed bigint NOT NULL DEFAULT 0,
    largest integer NOT NULL DEFAULT 4096,
    xid bigint NOT NULL DEFAULT pg_current_xact_id()::text::bigint,
    root bigint,
    UNIQUE (app, name)
) WITH (fillfactor = 70);
CREATE INDEX queues_by_xid ON {schema}.queues (xid);

CREATE TABLE {schema}.messages (
    queue bigint NOT NULL,
    position bigint NOT NULL,
    xid bigint NOT NULL,
    key text,
    headers text,
    body bytea NOT NULL,
    PRIMARY KEY (queue, position)
) PARTITION BY RANGE (position);
CREATE INDEX messages_by_xid ON {schema}.messages (xid, queue);

CREATE SEQUENCE {schema}.positions;

-- Locked while `positions` moves. Locks are rows and tables of the schema: any role that may connect
-- may hold an advisory lock as long as it likes.
CREATE TABLE {schema}.position_lock ();

CREATE TABLE {schema}.outgoing (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    xid bigint NOT NULL DEFAULT pg_current_xact_id()::text::bigint,
    app text NOT NULL,
    name text NOT NULL,
    key text CHECK (length(key) <= 1000),
    headers text CHECK (octet_length(headers) <= 131072),  -- 64 KiB and those that qdo adds
    body bytea NOT NULL CHECK (octet_length(body) <= 67108864),
    id text NOT NULL,
    due bigint,
    dedup_key text,
    dedup_ticks bigint
);
CREATE INDEX outgoing_by_xid ON {schema}.outgoing (xid);

CREATE TABLE {schema}.delayed (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    app text NOT NULL,
    due bigint NOT NULL,
    queue bigint NOT NULL,
    key text CHECK (length(key) <= 1000),
    headers text CHECK (octet_length(headers) <= 131072),
    body bytea NOT NULL CHECK (octet_length(body) <= 67108864)
);
CREATE INDEX delayed_by_due ON {schema}.delayed (app, due, number);
CREATE INDEX delayed_by_queue ON {schema}.delayed (queue);

-- The key is a digest, of a length that has a bound. It is the same for all roles.
CREATE TABLE {schema}.dedup (
    queue bigint NOT NULL,
    key bytea NOT NULL,
    id text NOT NULL,
    until bigint NOT NULL,
    PRIMARY KEY (queue, key)
);
CREATE INDEX dedup_by_until ON {schema}.dedup (until);

CREATE TABLE {schema}.dead_letters (
    queue bigint NOT NULL,
    position bigint NOT NULL,
    body bytea NOT NULL,
    key text,
    headers text,
    error text NOT NULL,
    traceback text NOT NULL,
    attempts integer NOT NULL,
    worker text NOT NULL,
    fence bigint NOT NULL,
    dead_at double precision NOT NULL,
    PRIMARY KEY (queue, position)
);
CREATE INDEX dead_letters_by_time ON {schema}.dead_letters (dead_at, position);
CREATE INDEX dead_letters_failed_at ON {schema}.dead_letters (to_timestamp(least(dead_at, 9e12)));

INSERT INTO {schema}.about (format, oldest, tables, functions, node, partition_ticks) VALUES (
    1, 1, '', '', (floor(random() * 281474976710656))::bigint | 1099511627776, {seconds}::bigint * 10000000);

-- Requests, see `qdo.brokers.requests`. Times are Unix times in seconds, which the server's clock gives.
-- States: 0 waiting, 1 running, 2 paused, 3 over. A request belongs to the role that asked for it.
CREATE TABLE {schema}.requests (
    app text NOT NULL,
    id text NOT NULL CHECK (length(id) <= 200),
    number bigint GENERATED ALWAYS AS IDENTITY,
    pool text NOT NULL CONSTRAINT pool_name CHECK (
        length(pool) <= 200 AND pool NOT IN ('.', '..', 'zookeeper')
        AND pool ~ '^[^/\u0001-\u001f\u007f-\u009f\ue000-\uf8ff\ufff0-\U0010ffff]+$'),
    priority integer NOT NULL CHECK (priority BETWEEN 0 AND 9),
    asked float8 NOT NULL,
    due float8 NOT NULL CHECK (due < 'Infinity'),
    state smallint NOT NULL DEFAULT 0,
    owner text NOT NULL DEFAULT '',  -- stays once it is over, so that its end may be repeated
    take integer NOT NULL DEFAULT 0,
    failed integer NOT NULL DEFAULT 0,
    crashed boolean NOT NULL DEFAULT false,
    started float8 NOT NULL DEFAULT 0,
    note text,
    error text,
    mark text CHECK (octet_length(mark) <= 1048576),
    reply text CHECK (octet_length(reply) <= 1048576),
    digest bytea NOT NULL CHECK (octet_length(digest) <= 64),
    keep float8 NOT NULL CHECK (keep < 'Infinity'),
    headers text CHECK (octet_length(headers) <= 131072),
    body bytea CHECK (octet_length(body) <= 67108864),
    outcome text,
    result_headers text CHECK (octet_length(result_headers) <= 131072),
    result bytea CHECK (octet_length(result) <= 67108864),
    until float8 NOT NULL DEFAULT 0,
    asker text NOT NULL DEFAULT session_user,
    parent text CHECK (length(parent) <= 200),  -- the request whose step this is
    deadline float8 NOT NULL DEFAULT 0 CHECK (deadline < 'Infinity'),
    PRIMARY KEY (id, app)  -- in this order, or a search for ids may read all rows of the app
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02,
    toast.autovacuum_vacuum_scale_factor = 0.02);
-- With `due`, a take passes requests that are not due without reading them.
CREATE INDEX requests_waiting ON {schema}.requests (app, pool, priority, number, due) WHERE state = 0;
CREATE INDEX requests_delayed ON {schema}.requests (app, pool, due) WHERE state = 0 AND due > asked;
CREATE INDEX requests_owned ON {schema}.requests (app, owner, started) WHERE state IN (1, 2);
-- Failed requests stay until an operator decides, so each kind has an index of its own. Steps go with
-- their requests.
CREATE INDEX requests_over ON {schema}.requests (app, until)
    WHERE state = 3 AND outcome IS DISTINCT FROM 'failed' AND parent IS NULL;
CREATE INDEX requests_failed ON {schema}.requests (app, pool, number)
    WHERE state = 3 AND outcome = 'failed' AND parent IS NULL;
CREATE INDEX requests_steps ON {schema}.requests (app, parent) WHERE parent IS NOT NULL;
CREATE INDEX requests_late ON {schema}.requests (app, deadline) WHERE deadline > 0 AND state < 3;

-- A pool is known while it has requests that wait; without a unique name, no sender waits for an open
-- transaction.
CREATE TABLE {schema}.pools (app text NOT NULL, name text NOT NULL);
CREATE INDEX pools_named ON {schema}.pools (app, name);

-- Streams, see `qdo.brokers.streams`.
CREATE TABLE {schema}.streams (
    number bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    app text NOT NULL,
    stream text NOT NULL,
    queue text NOT NULL,
    low text COLLATE "C" NOT NULL,
    high text COLLATE "C" NOT NULL,
    parents text[] NOT NULL,
    end_position bigint,
    hidden boolean NOT NULL,
    is_first boolean,
    UNIQUE (app, queue)
);
CREATE INDEX streams_by_name ON {schema}.streams (app, stream);
CREATE INDEX streams_open ON {schema}.streams (app, stream, low, queue) WHERE end_position IS NULL;
CREATE INDEX streams_hidden ON {schema}.streams (app) WHERE hidden;
CREATE UNIQUE INDEX streams_once ON {schema}.streams (app, stream) WHERE is_first;

-- The coordinator, see `qdo.coordination.sql`. The row of `tree` is locked by each write.
CREATE TABLE {schema}.tree (
    id integer PRIMARY KEY DEFAULT 1 CHECK (id = 1),
    server text NOT NULL DEFAULT ''
);

CREATE TABLE {schema}.znodes (
    parent text COLLATE "C" NOT NULL,
    name text COLLATE "C" NOT NULL,
    data bytea,
    acl text,
    czxid bigint NOT NULL,
    mzxid bigint NOT NULL,
    pzxid bigint NOT NULL,
    ctime bigint NOT NULL,
    mtime bigint NOT NULL,
    version bigint NOT NULL,
    creates bigint NOT NULL,
    aversion bigint NOT NULL,
    owner bigint NOT NULL,
    children integer NOT NULL,
    PRIMARY KEY (parent, name)
) WITH (fillfactor = 60);
CREATE INDEX znodes_owned ON {schema}.znodes (owner) WHERE owner <> 0;

CREATE TABLE {schema}.sessions (
    id bigint PRIMARY KEY,
    password bytea NOT NULL,
    timeout integer NOT NULL,
    generation integer NOT NULL,
    age text NOT NULL,
    beats bigint NOT NULL DEFAULT 0,
    heard timestamptz NOT NULL DEFAULT clock_timestamp()
) WITH (fillfactor = 20);

-- What changed, for the watches of clients. The last row has the newest zxid.
CREATE TABLE {schema}.changes (
    zxid bigint PRIMARY KEY,
    events text NOT NULL
);

INSERT INTO {schema}.tree DEFAULT VALUES;
INSERT INTO {schema}.changes VALUES (0, '[]');
INSERT INTO {schema}.znodes VALUES ('/', '', '', NULL, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);

-- Each text and number that a role can store has a bound, whichever program stores it: readers take
-- rows whole, and increase numbers.
DO $$
DECLARE
    bound text[];
BEGIN
    FOREACH bound SLICE 1 IN ARRAY ARRAY[
        ['apps', '', 'max_queues'],
        ['queues', 'length(app) <= 200', 'trimmed, largest, xid, root'],
        ['outgoing', 'length(app) <= 200 AND length(name) <= 200 AND length(id) <= 200'
            ' AND length(dedup_key) <= 1000', 'due, dedup_ticks, xid'],
        ['delayed', 'length(app) <= 200', 'due, queue'],
        ['dedup', 'length(id) <= 200 AND octet_length(key) <= 64', 'queue, until'],
        ['dead_letters', 'octet_length(body) <= 67108864 AND length(key) <= 1000'
            ' AND octet_length(headers) <= 131072 AND octet_length(error) <= 1048576'
            ' AND octet_length(traceback) <= 1048576 AND length(worker) <= 1000',
            'queue, position, attempts, fence, dead_at'],
        ['pools', 'length(app) <= 200 AND length(name) <= 200', ''],
        ['requests', 'length(app) <= 200 AND length(asker) <= 200'
            ' AND length(owner) <= 1000 AND length(outcome) <= 200'
            ' AND octet_length(note) <= 1048576 AND octet_length(error) <= 1048576',
            'asked, due, state, take, failed, started, keep, until, deadline'],
        ['streams', 'length(app) <= 200 AND length(stream) <= 200 AND length(queue) <= 200'
            ' AND length(low) <= 16 AND length(high) <= 16'
            ' AND cardinality(parents) <= 4096', 'end_position'],
        ['tree', 'length(server) <= 1000', ''],
        ['znodes', 'octet_length(parent) <= 65536 AND octet_length(name) <= 65536'
            ' AND octet_length(data) <= 1048576 AND octet_length(acl) <= 4194304'
            ' AND least(version, creates, aversion, children) >= -2147483648'
            ' AND greatest(version, creates, aversion, children) < 2147483648',
            'czxid, mzxid, pzxid, ctime, mtime'],
        ['sessions', 'length(age) <= 1000 AND octet_length(password) <= 64'
            ' AND timeout BETWEEN 200 AND 600000', 'generation, beats'],
        ['changes', 'octet_length(events) <= 67108864', 'zxid']
    ] LOOP
        EXECUTE format('ALTER TABLE {schema}.%I ADD CONSTRAINT bounds CHECK (%s)', bound[1],
            concat_ws(' AND ', nullif(bound[2], ''), CASE WHEN bound[3] <> '' THEN format(
                'least(%1$s) >= 0 AND greatest(%1$s) < 4611686018427387904', bound[3]) END));
    END LOOP;
END
$$;

-- The tables and functions of the PostgreSQL broker. `schema.py` explains them. `qdo admin broker init`
-- runs this with the name of the schema and the seconds of a partition, or the parts that are missing.

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

CREATE TABLE {schema}.about (
    id integer PRIMARY KEY DEFAULT 1 CHECK (id = 1),
    format integer NOT NULL,
    node bigint NOT NULL,
    partition_ticks bigint NOT NULL CHECK (partition_ticks > 0)
);

-- Its row is locked while queues of the app are created, so that they are counted, and by the one
-- of several transactions of the app that notifies.
CREATE TABLE {schema}.apps (
    name text PRIMARY KEY CHECK (length(name) <= 200),
    max_queues integer NOT NULL DEFAULT 100000
);

-- The limits of sizes in this file are those of `app.send`, which other programs could pass by.
CREATE TABLE {schema}.queues (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    app text NOT NULL,
    name text NOT NULL CONSTRAINT queue_name CHECK (
        length(name) <= 200 AND name NOT IN ('.', '..', 'zookeeper')
        AND name ~ '^[^/\u0001-\u001f\u007f-\u009f\ue000-\uf8ff\ufff0-\U0010ffff]+$'),
    trimmed bigint NOT NULL DEFAULT 0,
    largest integer NOT NULL DEFAULT 4096,
    xid bigint NOT NULL DEFAULT pg_current_xact_id()::text::bigint,
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

-- The key is a digest of the sender's role and key: no role suppresses the message of another.
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

-- The present as a position: 100 ns intervals since 1582-10-15. Functions in PL/pgSQL keep their
-- plans; those in SQL are planned at each call, which took longer than all else in a send.
CREATE FUNCTION {schema}.clock() RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN (extract(epoch FROM clock_timestamp()) * 10000000)::bigint + 122192928000000000;
END
$$;

-- Reserve consecutive positions and return the first. The caller has locked the queues that get
-- them. A sequence, which no rollback and no snapshot concerns: positions increase over the whole
-- schema, at any isolation level, even if the clock was set back. The lock is given up before the
-- transaction ends by undoing the block that took it. A session lock would stay behind if the
-- statement was cancelled just before it was unlocked.
CREATE FUNCTION {schema}.reserve(count bigint) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    first bigint;
BEGIN
    LOCK TABLE {schema}.position_lock IN EXCLUSIVE MODE;
    SELECT greatest(last_value + 1, {schema}.clock()) INTO first FROM {schema}.positions;
    PERFORM setval('{schema}.positions', first + count - 1);
    RAISE EXCEPTION 'reserved' USING ERRCODE = 'QD000';
EXCEPTION WHEN SQLSTATE 'QD000' THEN
    RETURN first;
END
$$;

-- Create the partition of a position unless it exists. ATTACH, because CREATE ... PARTITION OF
-- would wait for all readers and block them.
CREATE FUNCTION {schema}.add_partition(place bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    ticks bigint := (SELECT partition_ticks FROM {schema}.about);
    number bigint := place / ticks;
    known regclass := to_regclass('{schema}.messages_' || number);
BEGIN
    IF known IS NOT NULL THEN
        -- The transaction that created it may just have committed, and this one has locked
        -- `messages` before: it would not see the new partition there. Sizing the table takes its
        -- lock for a moment, which waits for the end of that commit and reads what it has changed.
        PERFORM pg_relation_size(known, 'init');
        RETURN;
    END IF;
    -- ATTACH takes this lock, too. An advisory lock would not let the session see a table that was
    -- created while it waited.
    LOCK TABLE ONLY {schema}.messages IN SHARE UPDATE EXCLUSIVE MODE;
    IF to_regclass('{schema}.messages_' || number) IS NOT NULL THEN
        RETURN;
    END IF;
    EXECUTE format('CREATE TABLE {schema}.messages_%s (LIKE {schema}.messages INCLUDING ALL)'
        ' WITH (autovacuum_enabled = off, toast.autovacuum_enabled = off)', number);
    EXECUTE format('ALTER TABLE {schema}.messages ATTACH PARTITION {schema}.messages_%s'
        ' FOR VALUES FROM (%s) TO (%s)', number, number * ticks, (number + 1) * ticks);
END
$$;

-- Divide the partitions behind a position into spans of 50; return the last position of each. A
-- session has too few locks to open thousands of partitions, which a blocked queue keeps.
CREATE FUNCTION {schema}.spans(after bigint) RETURNS SETOF bigint
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    ticks bigint := (SELECT partition_ticks FROM {schema}.about);
BEGIN
    RETURN QUERY SELECT (max(number) + 1) * ticks - 1 FROM (
        SELECT number, row_number() OVER (ORDER BY number) - 1 AS place FROM (
            SELECT substring(relname FROM '[0-9]+$')::bigint AS number
            FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid
            WHERE inhparent = '{schema}.messages'::regclass
        ) AS parts WHERE (number + 1) * ticks > after
    ) AS placed GROUP BY place / 50 ORDER BY 1;
END
$$;

-- Count the messages of a queue behind a position and up to another, and return the last one. An
-- undone block gives up the locks of its span.
CREATE FUNCTION {schema}.count_messages(
    of_queue bigint, after bigint, upto bigint, OUT total bigint, OUT top bigint
)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
SET plan_cache_mode = force_custom_plan AS $$
DECLARE
    span bigint;
    found bigint;
    last bigint;
BEGIN
    total := 0;
    FOR span IN SELECT {schema}.spans(after) LOOP
        EXIT WHEN after >= upto;
        BEGIN
            SELECT count(*), max(position) INTO found, last FROM {schema}.messages
                WHERE queue = of_queue AND position > after AND position <= least(span, upto);
            RAISE EXCEPTION 'counted' USING ERRCODE = 'QD000';
        EXCEPTION WHEN SQLSTATE 'QD000' THEN
            total := total + found;
            top := coalesce(last, top);
            after := span;
        END;
    END LOOP;
END
$$;

-- Limit the number of queues of an app. Senders may not.
CREATE FUNCTION {schema}.limit_queues(of_app text, most integer) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF most IS DISTINCT FROM (SELECT max_queues FROM {schema}.apps WHERE name = of_app) THEN
        INSERT INTO {schema}.apps (name, max_queues) VALUES (of_app, most)
            ON CONFLICT (name) DO UPDATE SET max_queues = excluded.max_queues;
    END IF;
END
$$;

-- The id of the message at a position: its UUID version 1.
CREATE FUNCTION {schema}.message_id(place bigint) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT lpad(to_hex(place & 4294967295), 8, '0')
        || '-' || lpad(to_hex((place >> 32) & 65535), 4, '0')
        || '-' || lpad(to_hex(((place >> 48) & 4095) | 4096), 4, '0')
        || '-8000-' || lpad(to_hex(node), 12, '0') FROM {schema}.about
$$;

-- Keep messages until the transaction commits, which then sends them; see `send`. The node tells
-- this schema from one of the same name in another database.
CREATE FUNCTION {schema}.stage(
    of_node bigint, of_app text, names text[], keys text[], headers text[], bodies bytea[], ids text[],
    dues bigint[], dedup_keys text[], dedup_ticks bigint[]
) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM {schema}.about WHERE node = of_node) THEN
        RAISE EXCEPTION 'another schema' USING ERRCODE = 'QD002';
    END IF;
    INSERT INTO {schema}.outgoing
        (app, name, key, headers, body, id, due, dedup_key, dedup_ticks)
        SELECT of_app, given.* FROM unnest(
            names, keys, stage.headers, bodies, ids, dues, dedup_keys, stage.dedup_ticks) AS given;
END
$$;

-- The last step of a transaction before its commit, so that it holds its locks for a moment only,
-- however long it was open. The first message sends all: locks are taken in one order.
CREATE FUNCTION {schema}.send_staged() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    own_xid bigint := pg_current_xact_id()::text::bigint;
    sending record;
BEGIN
    IF NOT EXISTS (SELECT FROM {schema}.outgoing WHERE number = NEW.number) THEN
        RETURN NULL;
    END IF;
    -- Lock all queues first: a transaction that adds a partition must not wait for a queue.
    FOR sending IN
        SELECT app, array_agg(name) AS names
        FROM {schema}.outgoing WHERE xid = own_xid GROUP BY app ORDER BY app
    LOOP
        PERFORM {schema}.lock_queues(sending.app, sending.names, NULL);
    END LOOP;
    FOR sending IN
        SELECT app, array_agg(name ORDER BY number) AS names,
            array_agg(key ORDER BY number) AS keys, array_agg(headers ORDER BY number) AS headers,
            array_agg(body ORDER BY number) AS bodies, array_agg(id ORDER BY number) AS ids,
            array_agg(due ORDER BY number) AS dues,
            array_agg(dedup_key ORDER BY number) AS dedup_keys,
            array_agg(dedup_ticks ORDER BY number) AS dedup_ticks
        FROM {schema}.outgoing WHERE xid = own_xid GROUP BY app ORDER BY app
    LOOP
        PERFORM {schema}.send(sending.app, sending.names, sending.keys, sending.headers,
            sending.bodies, sending.ids, sending.dues, sending.dedup_keys, sending.dedup_ticks,
            NULL);
        -- Transactions that notify commit one after the other, each with its own write to disk. So
        -- only one of those that commit at once does; listeners look again soon for the others.
        PERFORM FROM {schema}.apps WHERE name = sending.app FOR NO KEY UPDATE SKIP LOCKED;
        IF FOUND THEN
            PERFORM pg_notify({schema}.channel(sending.app), 'again');
        END IF;
    END LOOP;
    DELETE FROM {schema}.outgoing WHERE xid = own_xid;
    RETURN NULL;
END
$$;
CREATE CONSTRAINT TRIGGER send_staged AFTER INSERT ON {schema}.outgoing
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION {schema}.send_staged();
-- Also for sessions with session_replication_role = replica, as those that load many rows.
ALTER TABLE {schema}.outgoing ENABLE ALWAYS TRIGGER send_staged;

-- The name under which listeners of an app are notified; names of channels have 63 bytes.
CREATE FUNCTION {schema}.channel(of_app text) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN 'qdo_' || md5((SELECT node FROM {schema}.about) || of_app);
END
$$;

-- Move due messages into their queues, in order of due time; return their number. Messages beyond
-- the limits are left for the next call; the first may be larger. Of calls at the same time, the one
-- that locks the app's next message moves; the others return NULL. Messages of locked queues wait
-- for a later call. If nothing else is due, the call waits for one of those queues: a queue with
-- many senders is locked at most moments, and its lock goes to those that wait.
CREATE FUNCTION {schema}.move_due(of_app text, most integer, most_bytes bigint) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET lock_timeout = '200ms' AS $$
DECLARE
    now bigint := {schema}.clock();
    locked bigint[] := ARRAY[]::bigint[];
    asked bigint[];
    free bigint[];
    chosen bigint[];
    names text[];
    keys text[];
    heads text[];
    bodies bytea[];
BEGIN
    PERFORM FROM {schema}.delayed WHERE number = (
        SELECT number FROM {schema}.delayed WHERE app = of_app AND due <= now
        ORDER BY due, number LIMIT 1) FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    LOOP
        SELECT array_agg(DISTINCT queue) INTO asked FROM (
            SELECT queue FROM {schema}.delayed
            WHERE app = of_app AND due <= now AND queue <> ALL (locked)
            ORDER BY due, number LIMIT most) AS due;
        IF asked IS NULL THEN  -- all queues are locked; any of them, or one could keep others back
            free := ARRAY[locked[1 + floor(random() * cardinality(locked))]];
            PERFORM FROM {schema}.queues WHERE id = ANY (free) FOR NO KEY UPDATE;
            EXIT;
        END IF;
        free := ARRAY(SELECT id FROM {schema}.queues WHERE id = ANY (asked)
            ORDER BY id FOR NO KEY UPDATE SKIP LOCKED);
        EXIT WHEN cardinality(free) > 0;
        locked := locked || asked;
    END LOOP;
    -- A later statement sees what was moved before the locks were free.
    SELECT array_agg(number) INTO chosen FROM (
        SELECT number, sum(size) OVER (ORDER BY due, number) - size AS before FROM (
            SELECT number, due, octet_length(body) + coalesce(octet_length(headers), 0) AS size
            FROM {schema}.delayed WHERE app = of_app AND due <= now AND queue = ANY (free)
            ORDER BY due, number LIMIT most
        ) AS due
    ) AS sized WHERE before < most_bytes;
    -- Delete first: what an operator is canceling is either canceled or moved.
    WITH gone AS (DELETE FROM {schema}.delayed WHERE number = ANY (chosen) RETURNING *)
    SELECT array_agg(queues.name ORDER BY due, number), array_agg(key ORDER BY due, number),
        array_agg(headers ORDER BY due, number), array_agg(body ORDER BY due, number)
        INTO names, keys, heads, bodies
        FROM gone JOIN {schema}.queues ON queues.id = queue;
    IF names IS NOT NULL THEN
        PERFORM {schema}.append(of_app, names, keys, heads, bodies, NULL);
    END IF;
    RETURN coalesce(cardinality(names), 0);
END
$$;

-- Return the queues with messages, or with first messages, of transactions that were not visible
-- in an earlier snapshot, and the present snapshot: its first transaction that has not begun, and
-- those in progress. Messages up to `since` are old; partitions with no others are not opened. With
-- it the time until the next delayed message is due, in ticks, and the last position and the end of
-- the log on disk, both of which decrease only if the server lost committed transactions.
CREATE FUNCTION {schema}.look(
    of_app text, seen_next bigint, seen_running bigint[], since bigint,
    OUT next_xid bigint, OUT running bigint[], OUT names text[], OUT due_ticks bigint,
    OUT last_position bigint, OUT log_end bigint
)
LANGUAGE plpgsql STABLE SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_custom_plan AS $$
DECLARE
    span bigint;
    found bigint[];
    changed bigint[] := ARRAY[]::bigint[];
BEGIN
    next_xid := pg_snapshot_xmax(pg_current_snapshot())::text::bigint;
    FOR span IN SELECT {schema}.spans(since) LOOP
        BEGIN
            -- A dump brings messages of another cluster, whose ids of transactions are ahead.
            found := ARRAY(
                SELECT queue FROM {schema}.messages
                    WHERE messages.xid >= seen_next AND messages.xid < next_xid
                    AND position > since AND position <= span
                UNION SELECT queue FROM {schema}.messages
                    WHERE messages.xid = ANY (seen_running)
                    AND position > since AND position <= span);
            RAISE EXCEPTION 'looked' USING ERRCODE = 'QD000';
        EXCEPTION WHEN SQLSTATE 'QD000' THEN
            changed := changed || found;
            since := span;
        END;
    END LOOP;
    SELECT ARRAY(SELECT pg_snapshot_xip(pg_current_snapshot())::text::bigint),
        ARRAY(SELECT name FROM {schema}.queues WHERE app = of_app AND id = ANY (changed)),
        (SELECT due - {schema}.clock() FROM {schema}.delayed WHERE app = of_app
            ORDER BY due LIMIT 1),
        (SELECT last_value FROM {schema}.positions),
        CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn()
            ELSE pg_current_wal_flush_lsn() END - '0/0'
    INTO running, names, due_ticks, last_position, log_end;
END
$$;

-- Let further positions be later than one that was seen before the server lost transactions.
CREATE FUNCTION {schema}.advance(seen bigint) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    missing bigint := seen - (SELECT last_value FROM {schema}.positions);
BEGIN
    IF missing > 0 THEN
        PERFORM {schema}.reserve(missing);
    END IF;
END
$$;

-- Hide processed messages of a queue that are old enough; return their number.
CREATE FUNCTION {schema}.trim(of_app text, of_queue text, done bigint, older_ticks bigint)
RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    upto bigint := least(done, {schema}.clock() - older_ticks);
    own record;
    hidden bigint;
    top bigint;
BEGIN
    SELECT id, trimmed INTO own FROM {schema}.queues WHERE app = of_app AND name = of_queue;
    IF NOT FOUND THEN
        RETURN 0;
    END IF;
    SELECT * INTO hidden, top FROM {schema}.count_messages(own.id, own.trimmed, upto);
    IF hidden > 0 THEN
        UPDATE {schema}.queues SET trimmed = top WHERE id = own.id AND trimmed < top;
    END IF;
    RETURN hidden;
END
$$;

-- Drop the partitions of which every message is hidden; return their names. Later messages are
-- beyond the position that it reserves, but transactions that reserved theirs before may still be
-- open: the lock waits for them, and the last look finds their messages. Only that look and the
-- drops happen under the lock, which nobody can read or write beside. The lock timeout keeps a
-- transaction that uses a partition from blocking all others behind the drop.
CREATE FUNCTION {schema}.drop_partitions() RETURNS text[]
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET lock_timeout = '200ms' AS $$
DECLARE
    ticks bigint := (SELECT partition_ticks FROM {schema}.about);
    closed bigint := {schema}.reserve(1);
    before pg_snapshot;
    done text[] := ARRAY[]::text[];
    dropped text[] := ARRAY[]::text[];
    part record;
    name text;
    used boolean;
BEGIN
    PERFORM FROM {schema}.about FOR UPDATE SKIP LOCKED;  -- another call drops
    IF NOT FOUND OR current_setting('transaction_isolation') <> 'read committed' THEN
        RETURN dropped;
    END IF;
    PERFORM {schema}.add_partition({schema}.clock() + ticks);
    before := pg_current_snapshot();
    FOR part IN
        SELECT relname, substring(relname FROM '[0-9]+$')::bigint AS number
        FROM pg_inherits JOIN pg_class ON pg_class.oid = inhrelid
        WHERE inhparent = '{schema}.messages'::regclass ORDER BY 2
    LOOP
        -- Each drop takes locks until the commit; a later call drops more.
        EXIT WHEN (part.number + 1) * ticks > closed OR cardinality(done) = 50;
        BEGIN
            EXECUTE format('WITH RECURSIVE found(queue) AS ('
                ' (SELECT queue FROM {schema}.%1$I ORDER BY queue LIMIT 1)'
                ' UNION ALL SELECT (SELECT queue FROM {schema}.%1$I AS further'
                '   WHERE further.queue > found.queue ORDER BY queue LIMIT 1)'
                ' FROM found WHERE found.queue IS NOT NULL)'
                ' SELECT EXISTS (SELECT FROM found JOIN {schema}.queues ON id = found.queue'
                '   WHERE trimmed < (SELECT max(position) FROM {schema}.%1$I AS own'
                '     WHERE own.queue = found.queue))', part.relname) INTO used;
            RAISE EXCEPTION 'inspected' USING ERRCODE = 'QD000';  -- gives up the locks
        EXCEPTION WHEN SQLSTATE 'QD000' THEN
            IF NOT used THEN
                done := done || part.relname::text;
            END IF;
        END;
    END LOOP;
    IF cardinality(done) > 0 THEN
        LOCK TABLE ONLY {schema}.messages IN ACCESS EXCLUSIVE MODE;
    END IF;
    FOREACH name IN ARRAY done LOOP
        EXECUTE format('SELECT EXISTS (SELECT FROM {schema}.%1$I WHERE xid >= $1'
            ' AND xid < pg_snapshot_xmax(pg_current_snapshot())::text::bigint)'
            ' OR EXISTS (SELECT FROM {schema}.%1$I WHERE xid = ANY ($2))', name)
            INTO used USING pg_snapshot_xmax(before)::text::bigint,
            ARRAY(SELECT pg_snapshot_xip(before)::text::bigint);
        CONTINUE WHEN used;
        EXECUTE format('DROP TABLE {schema}.%I', name);
        dropped := dropped || name;
    END LOOP;
    RETURN dropped;
EXCEPTION WHEN lock_not_available THEN
    RETURN ARRAY[]::text[];
END
$$;

-- Store a dead letter unless its position has one.
CREATE FUNCTION {schema}.bury(
    of_app text, of_queue text, of_position bigint, body bytea, key text, headers text,
    error text, traceback text, attempts integer, worker text, fence bigint, dead_at float8
) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM {schema}.lock_queues(of_app, ARRAY[of_queue], NULL);
    INSERT INTO {schema}.dead_letters
        SELECT id, of_position, body, key, headers, error, traceback, attempts, worker, fence,
            dead_at FROM {schema}.queues WHERE app = of_app AND name = of_queue
        ON CONFLICT DO NOTHING;
END
$$;

INSERT INTO {schema}.about (format, node, partition_ticks) VALUES (
    1, (floor(random() * 281474976710656))::bigint | 1099511627776, {seconds}::bigint * 10000000);

-- Format 2: requests, see `qdo.brokers.requests`. Times are Unix times in seconds, which the server's
-- clock gives. States: 0 waiting, 1 running, 2 paused, 3 over.
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
    PRIMARY KEY (id, app)  -- in this order, or a search for ids may read all rows of the app
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02,
    toast.autovacuum_vacuum_scale_factor = 0.02);
-- With `due`, a take passes requests that are not due without reading them.
CREATE INDEX requests_waiting ON {schema}.requests (app, pool, priority, number, due) WHERE state = 0;
CREATE INDEX requests_delayed ON {schema}.requests (app, pool, due) WHERE state = 0 AND due > asked;
CREATE INDEX requests_owned ON {schema}.requests (app, owner, started) WHERE state IN (1, 2);
CREATE INDEX requests_over ON {schema}.requests (app, until) WHERE state = 3;

CREATE FUNCTION {schema}.unix_time() RETURNS float8
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN extract(epoch FROM clock_timestamp());
END
$$;

-- Store requests unless their ids are known; return for each whether it was new. With a node, the
-- transaction is one of the app, and notifies at its commit; see `stage`.
CREATE FUNCTION {schema}.ask_requests(
    of_node bigint, of_app text, pools text[], ids text[], priorities integer[], dues float8[],
    replies text[], keeps float8[], digests bytea[], heads text[], bodies bytea[], lock_ms integer
) RETURNS boolean[]
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    fresh text[] := ARRAY[]::text[];
    added text[];
    missing bigint;
    other text;
BEGIN
    IF of_node <> (SELECT node FROM {schema}.about) THEN
        RAISE EXCEPTION 'another schema' USING ERRCODE = 'QD002';
    END IF;
    PERFORM set_config('qdo.staged', CASE WHEN of_node IS NULL THEN 'off' ELSE 'on' END, true);
    IF lock_ms IS NOT NULL THEN
        PERFORM set_config('lock_timeout', lock_ms::text, true);
    END IF;
    LOOP
        WITH new AS (
            INSERT INTO {schema}.requests
                (app, pool, id, priority, asked, due, reply, keep, digest, headers, body)
                SELECT of_app, given.pool, given.id, given.priority, {schema}.unix_time(),
                    given.due, given.reply, given.keep, given.digest, given.head, given.body
                FROM unnest(pools, ids, priorities, dues, replies, keeps, digests, heads, bodies)
                    WITH ORDINALITY AS given(
                        pool, id, priority, due, reply, keep, digest, head, body, place)
                ORDER BY given.place
                ON CONFLICT DO NOTHING RETURNING id
        ) SELECT array_agg(id) INTO added FROM new;
        fresh := fresh || added;
        IF cardinality(fresh) = cardinality(ids) THEN
            RETURN array_fill(true, ARRAY[cardinality(ids)]);
        END IF;
        SELECT count(*) FILTER (WHERE known.id IS NULL),
            min(given.id) FILTER (WHERE known.digest <> given.digest) INTO missing, other
            FROM unnest(ids, digests) AS given(id, digest)
            LEFT JOIN {schema}.requests AS known
                ON app = of_app AND known.id = ANY (ids) AND known.id = given.id;
        IF other IS NOT NULL THEN
            RAISE EXCEPTION 'another request has this id' USING ERRCODE = 'QD004', DETAIL = other;
        END IF;
        EXIT WHEN missing = 0;  -- else they expired meanwhile
    END LOOP;
    RETURN ARRAY(
        SELECT fresh.id IS NOT NULL AND place = min(place) OVER (PARTITION BY given.id)
        FROM unnest(ids) WITH ORDINALITY AS given(id, place)
        LEFT JOIN unnest(fresh) AS fresh(id) USING (id) ORDER BY place);
END
$$;

-- As the notification of `send_staged`: only one of the transactions that commit at once notifies.
CREATE FUNCTION {schema}.tell_of_requests() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM {schema}.apps WHERE name = NEW.app) THEN
        INSERT INTO {schema}.apps (name) VALUES (NEW.app) ON CONFLICT DO NOTHING;
    END IF;
    PERFORM FROM {schema}.apps WHERE name = NEW.app FOR NO KEY UPDATE SKIP LOCKED;
    IF FOUND THEN
        PERFORM pg_notify({schema}.channel(NEW.app), 'again');
    END IF;
    RETURN NULL;
END
$$;
CREATE CONSTRAINT TRIGGER tell_of_requests AFTER INSERT ON {schema}.requests
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
    WHEN (current_setting('qdo.staged', true) = 'on')
    EXECUTE FUNCTION {schema}.tell_of_requests();
ALTER TABLE {schema}.requests ENABLE ALWAYS TRIGGER tell_of_requests;

-- Return how many index entries this transaction has read to find requests to take.
CREATE FUNCTION {schema}.request_entries() RETURNS bigint
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN pg_stat_get_xact_tuples_returned('{schema}.requests_waiting'::regclass)
        + pg_stat_get_xact_tuples_returned('{schema}.requests_owned'::regclass);
END
$$;

-- Take the requests of an owner that it does not run, and then due ones for its free places, up to
-- `most_bytes` of bodies. Return them; the marks of all that it runs, in rows without `take`; and
-- in the last row, what the next call may leave out.
-- While any transaction of the server stays open, index entries of requests that were taken stay as
-- well, and each search would read them again. So a search begins behind the number up to which the
-- last one has looked, for each priority, and at owned ones that were taken since. A whole search
-- finds what came back since, or was committed late; `spent` is its duration if it has read much.
CREATE FUNCTION {schema}.take_requests(
    of_app text, of_owner text, of_pool text, places integer, running text[], most_bytes bigint,
    since float8, passed bigint[], is_whole boolean
) RETURNS TABLE (
    id text, take integer, priority integer, failed integer, crashed boolean, error text,
    asked float8, reply text, headers text, body bytea, mark text, next_due float8,
    looked_at float8, looked_through bigint[], spent float8
)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
#variable_conflict use_column
DECLARE
    now float8 := {schema}.unix_time();
    newest bigint := (
        SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM {schema}.requests_number_seq);
    entries bigint := -{schema}.request_entries();
    chosen text[];
    last bigint[];
    is_rest boolean;
BEGIN
    WITH own AS MATERIALIZED (
        SELECT id, -1 AS priority, number, octet_length(body) AS size FROM {schema}.requests
        WHERE app = of_app AND owner = of_owner AND state IN (1, 2)
            AND started >= CASE WHEN is_whole THEN 0 ELSE since END
            AND pool = of_pool AND id <> ALL (running)
        FOR UPDATE SKIP LOCKED
    ), next AS MATERIALIZED (
        SELECT found.* FROM generate_series(0, 9) AS given(priority) CROSS JOIN LATERAL (
            SELECT id, priority, number, octet_length(body) AS size FROM {schema}.requests
            WHERE app = of_app AND pool = of_pool AND state = 0 AND due <= now
                AND priority = given.priority
                AND number > CASE WHEN is_whole THEN 0 ELSE passed[given.priority + 1] END
            ORDER BY number LIMIT places FOR UPDATE SKIP LOCKED
        ) AS found LIMIT places
    ), sized AS (
        SELECT *, sum(size) OVER (ORDER BY priority, number) - size < most_bytes AS fits
        FROM (SELECT * FROM own UNION ALL SELECT * FROM next) AS found
    )
    SELECT array_agg(id) FILTER (WHERE fits),
        max(ARRAY[priority, number]) FILTER (WHERE fits AND priority >= 0),
        count(*) FILTER (WHERE priority >= 0) = places OR count(*) FILTER (WHERE NOT fits) > 0
        INTO chosen, last, is_rest FROM sized;
    IF chosen IS NOT NULL THEN
        RETURN QUERY
        WITH taken AS (
            UPDATE {schema}.requests AS held
            SET state = 1, owner = of_owner, take = held.take + 1, started = now, note = NULL
            WHERE app = of_app AND id = ANY (chosen)
            RETURNING held.*
        )
        SELECT id, take, priority, failed, crashed, error, asked, reply, headers, body, NULL,
            NULL::float8, NULL::float8, NULL::bigint[], NULL::float8
        FROM taken ORDER BY priority, number;
    END IF;
    RETURN QUERY
    WITH running AS MATERIALIZED (  -- by their ids, not by their owner
        SELECT * FROM {schema}.requests WHERE app = of_app AND id = ANY (running || chosen)
    )
    SELECT id, NULL::integer, NULL::integer, NULL::integer, NULL::boolean, NULL, NULL::float8,
        NULL, NULL, NULL::bytea, mark, NULL::float8, NULL::float8, NULL::bigint[], NULL::float8
    FROM running WHERE owner = of_owner AND state IN (1, 2) AND mark IS NOT NULL;
    next_due := now;
    IF NOT is_rest THEN
        passed := array_fill(newest, ARRAY[10]);
        SELECT min(due) INTO next_due FROM {schema}.requests
            WHERE app = of_app AND pool = of_pool AND state = 0 AND due > now AND due > asked;
    ELSIF last IS NOT NULL THEN
        passed := array_fill(newest, ARRAY[last[1]::integer]) || last[2] || passed[last[1] + 2:];
    END IF;
    looked_at := now;
    looked_through := passed;
    entries := entries + {schema}.request_entries();
    spent := CASE WHEN entries > 2000 THEN {schema}.unix_time() - now ELSE 0 END;
    RETURN NEXT;
END
$$;

-- The conditions on `state` in the next functions do not match those of an index of some states:
-- the planner might read all its rows instead of those of the given ids.

-- Set requests to a state if their takes are still valid, and send the messages of those; `places`
-- names the request of each message. Return for each request whether its take was valid; for one
-- that ends, also if it has ended it before. NULL lets failed attempts, due time and error stay.
CREATE FUNCTION {schema}.report_requests(
    of_app text, of_ids text[], owners text[], takes integer[], states integer[], notes text[],
    failures integer[], due_times float8[], errors text[], outcomes text[], heads text[],
    results bytea[], places integer[], names text[], keys text[], headers text[], bodies bytea[],
    ids text[], dues bigint[], dedup_keys text[], dedup_ticks bigint[], lock_ms integer
) RETURNS boolean[]
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    valid bigint[];
BEGIN
    IF lock_ms IS NOT NULL THEN
        PERFORM set_config('lock_timeout', lock_ms::text, true);
    END IF;
    WITH changed AS (
        UPDATE {schema}.requests AS held SET
            state = given.state,
            owner = CASE given.state WHEN 0 THEN '' ELSE held.owner END,
            note = CASE WHEN given.state < 3 THEN given.note
                WHEN given.outcome <> 'done' THEN held.note END,
            mark = CASE WHEN given.state = 3 OR given.state = 1 AND held.state = 2
                AND held.mark LIKE '{"resume"%' THEN NULL ELSE held.mark END,
            crashed = held.crashed AND coalesce(given.failed = held.failed, true),
            failed = coalesce(given.failed, held.failed),
            due = coalesce(given.due, held.due),
            error = CASE given.state WHEN 3 THEN given.error
                ELSE coalesce(given.error, held.error) END,
            headers = CASE given.outcome WHEN 'done' THEN NULL ELSE held.headers END,
            body = CASE given.outcome WHEN 'done' THEN NULL ELSE held.body END,
            outcome = given.outcome, result_headers = given.head, result = given.result,
            until = CASE given.state WHEN 3 THEN {schema}.unix_time() + held.keep ELSE 0 END
        FROM unnest(of_ids, owners, takes, states, notes, failures, due_times, errors, outcomes,
            heads, results) WITH ORDINALITY AS given(
                id, owner, take, state, note, failed, due, error, outcome, head, result, place)
        WHERE app = of_app AND held.id = ANY (of_ids) AND held.id = given.id
            AND held.owner = given.owner AND held.take = given.take
            AND CASE given.state WHEN 3 THEN held.state < 3 ELSE held.state IN (1, 2) END
        RETURNING given.place
    ) SELECT array_agg(place) INTO valid FROM changed;
    IF valid IS NOT NULL AND names IS NOT NULL THEN
        SELECT array_agg(name ORDER BY number), array_agg(key ORDER BY number),
            array_agg(head ORDER BY number), array_agg(body ORDER BY number),
            array_agg(id ORDER BY number), array_agg(due ORDER BY number),
            array_agg(dedup_key ORDER BY number), array_agg(ticks ORDER BY number)
            INTO names, keys, headers, bodies, ids, dues, dedup_keys, dedup_ticks
            FROM unnest(places, names, keys, headers, bodies, ids, dues, dedup_keys, dedup_ticks)
                WITH ORDINALITY AS given(
                    place, name, key, head, body, id, due, dedup_key, ticks, number)
            WHERE place = ANY (valid);
        IF array_remove(ids, NULL) || array_remove(dedup_keys, NULL) <> '{}' THEN
            PERFORM {schema}.send(
                of_app, names, keys, headers, bodies, ids, dues, dedup_keys, dedup_ticks, NULL);
        ELSIF names IS NOT NULL THEN
            PERFORM {schema}.append(of_app, names, keys, headers, bodies, NULL);
        END IF;
    END IF;
    IF cardinality(valid) = cardinality(of_ids) THEN
        RETURN array_fill(true, ARRAY[cardinality(of_ids)]);
    END IF;
    RETURN ARRAY(
        SELECT place = ANY (coalesce(valid, '{}')) OR given.state = 3 AND EXISTS (
            SELECT FROM {schema}.requests AS held
            WHERE app = of_app AND held.id = given.id AND held.state > 2
                AND held.owner = given.owner AND held.take = given.take)
        FROM unnest(of_ids, owners, takes, states) WITH ORDINALITY
            AS given(id, owner, take, state, place) ORDER BY place);
END
$$;

-- End a request that waits, with the number of its last take. Senders may.
CREATE FUNCTION {schema}.cancel_request(
    of_app text, of_id text, of_take integer, why text, names text[], keys text[], headers text[],
    bodies bytea[], ids text[], dues bigint[], dedup_keys text[], dedup_ticks bigint[]
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN ({schema}.report_requests(
        of_app, ARRAY[of_id], ARRAY[''], ARRAY[of_take], ARRAY[3], NULL, NULL, NULL, ARRAY[why],
        ARRAY['cancelled'], NULL, NULL, ARRAY(SELECT 1 FROM unnest(names)), names, keys, headers,
        bodies, ids, dues, dedup_keys, dedup_ticks, NULL))[1];
END
$$;

-- Set the mark of a running or paused request; return whether it is one. One that is being
-- cancelled does not go on.
CREATE FUNCTION {schema}.mark_request(of_app text, of_id text, of_mark text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE {schema}.requests SET mark = of_mark
        WHERE app = of_app AND id = of_id AND state BETWEEN 1 AND 2
            AND (mark IS NULL OR mark NOT LIKE '{"cancel"%' OR of_mark LIKE '{"cancel"%');
    RETURN FOUND;
END
$$;

-- Let a request wait again that is over and has its body. What ended it before is an older take.
CREATE FUNCTION {schema}.retry_request(of_app text, of_id text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE {schema}.requests SET state = 0, owner = '', take = take + 1, failed = 0,
        crashed = false, due = {schema}.unix_time(), note = NULL, error = NULL, outcome = NULL,
        result_headers = NULL, result = NULL, until = 0
        WHERE app = of_app AND id = of_id AND state > 2 AND body IS NOT NULL;
    RETURN FOUND;
END
$$;

-- Let the requests of a worker that is gone wait again; return their number.
CREATE FUNCTION {schema}.give_back_requests(of_app text, of_owner text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    given bigint;
BEGIN
    UPDATE {schema}.requests SET state = 0, owner = '', failed = failed + 1, crashed = true,
        due = {schema}.unix_time(), note = NULL
        WHERE app = of_app AND owner = of_owner AND state IN (1, 2);
    GET DIAGNOSTICS given = ROW_COUNT;
    RETURN given;
END
$$;

-- Return a request to those who know its id.
CREATE FUNCTION {schema}.find_request(of_app text, of_id text) RETURNS SETOF {schema}.requests
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN QUERY SELECT * FROM {schema}.requests WHERE app = of_app AND id = of_id;
END
$$;

-- Delete requests that are over and were kept as long as asked; return their number.
CREATE FUNCTION {schema}.expire_requests(of_app text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    now float8 := {schema}.unix_time();
    gone bigint;
BEGIN
    DELETE FROM {schema}.requests WHERE app = of_app AND id = ANY (ARRAY(
        SELECT id FROM {schema}.requests WHERE app = of_app AND state = 3 AND until <= now
        ORDER BY until LIMIT 1000 FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS gone = ROW_COUNT;
    RETURN gone;
END
$$;

REVOKE ALL ON ALL FUNCTIONS IN SCHEMA {schema} FROM PUBLIC;
UPDATE {schema}.about SET format = 2;

-- Format 3: streams, see `qdo.brokers.streams`. In the table `queues`, `root` is the id of the first
-- queue of a shard's stream, NULL for other queues.
ALTER TABLE {schema}.queues ADD root bigint;
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
    UNIQUE (app, queue)
);
CREATE INDEX streams_by_name ON {schema}.streams (app, stream);
CREATE INDEX streams_open ON {schema}.streams (app, stream, low, queue) WHERE end_position IS NULL;
CREATE INDEX streams_hidden ON {schema}.streams (app) WHERE hidden;

-- Lock queues in the order of their ids; create those that do not exist, before any is locked.
-- So no two calls wait for each other: calls that create wait by name and have locked nothing yet,
-- and calls that lock wait by id, and do not see the queues of open transactions. Without `lock_ms`,
-- the lock timeout of the caller applies. Return whether one of them is a shard, or has the name of
-- one that does not exist; then none may be locked.
DROP FUNCTION IF EXISTS {schema}.lock_queues(text, text[], integer);
CREATE FUNCTION {schema}.lock_queues(of_app text, names text[], lock_ms integer) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    wanted integer := CASE cardinality(names) WHEN 1 THEN 1
        ELSE (SELECT count(DISTINCT name) FROM unnest(names) AS name) END;
    found integer := 1;
    most integer;
    missing text;
    has_shards boolean;
BEGIN
    IF lock_ms IS NOT NULL THEN
        PERFORM set_config('lock_timeout', lock_ms::text, true);
    END IF;
    LOOP
        IF wanted > 1 THEN
            SELECT count(*) INTO found FROM {schema}.queues
                WHERE app = of_app AND name = ANY (names);
        END IF;
        IF found >= wanted THEN
            SELECT count(*), bool_or(root IS NOT NULL) INTO found, has_shards FROM (
                SELECT root FROM {schema}.queues
                WHERE app = of_app AND name = ANY (names) ORDER BY id FOR NO KEY UPDATE
            ) AS locked;
            EXIT WHEN found >= wanted;
        END IF;
        IF EXISTS (SELECT FROM unnest(names) AS given(name)
                JOIN {schema}.streams ON app = of_app AND stream = {schema}.stream_of(given.name)
                LEFT JOIN {schema}.queues AS known ON known.app = of_app
                    AND known.name = given.name WHERE known.name IS NULL) THEN
            RETURN true;
        END IF;
        SELECT max_queues INTO most FROM {schema}.apps WHERE name = of_app FOR NO KEY UPDATE;
        IF most IS NULL THEN
            INSERT INTO {schema}.apps (name) VALUES (of_app) ON CONFLICT DO NOTHING;
            CONTINUE;
        END IF;
        SELECT given.name INTO missing FROM unnest(names) AS given(name) WHERE NOT EXISTS (
            SELECT FROM {schema}.queues AS known WHERE app = of_app AND known.name = given.name
        ) LIMIT 1;
        IF missing IS NOT NULL AND wanted - found > most
                - (SELECT count(*) FROM {schema}.queues WHERE app = of_app) THEN
            RAISE EXCEPTION 'too many queues' USING ERRCODE = 'QD001', DETAIL = missing, HINT = most;
        END IF;
        INSERT INTO {schema}.queues (app, name)
            SELECT DISTINCT of_app, name FROM unnest(names) AS name ORDER BY name
            ON CONFLICT DO NOTHING;
        found := wanted;
    END LOOP;
    RETURN has_shards;
END
$$;

-- Return the hash of a message's key, see `qdo.brokers.streams.key_hash`.
CREATE FUNCTION {schema}.key_hash(key text) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN left(encode(sha256(convert_to(key, 'UTF8')), 'hex'), 16);
END
$$;

-- Return the stream of a queue that is named like a shard, see `qdo.queues.stream_of`, else NULL.
CREATE FUNCTION {schema}.stream_of(name text) RETURNS text
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN substring(name FROM
        '^([^.]+)\.(?:[0-9a-f]{2}){0,8}-(?:[0-9a-f]{2}){0,8}(?:\.[0-9]+)?$');
END
$$;

-- Return the queues of messages, with the open shard of its key for each that names a shard; NULL
-- if they are the same.
CREATE FUNCTION {schema}.route(of_app text, names text[], keys text[]) RETURNS text[]
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    routed text[];
    keyless text;
BEGIN
    -- Without functions of its own for each message, which take 8 us each.
    WITH named AS MATERIALIZED (
        SELECT name, stream FROM (
            SELECT name, {schema}.stream_of(name) AS stream
            FROM (SELECT DISTINCT name FROM unnest(names) AS name) AS given
        ) AS found WHERE EXISTS (SELECT FROM {schema}.streams
            WHERE app = of_app AND streams.stream = found.stream)
    )
    SELECT array_agg(coalesce(heir.queue, given.name) ORDER BY place),
        min(given.name) FILTER (WHERE given.key IS NULL AND named.name IS NOT NULL)
        INTO routed, keyless
        FROM unnest(names, keys) WITH ORDINALITY AS given(name, key, place)
        LEFT JOIN named ON named.name = given.name
        LEFT JOIN LATERAL (
            SELECT queue FROM {schema}.streams
            WHERE app = of_app AND stream = named.stream AND end_position IS NULL
                AND low <= left(encode(sha256(convert_to(given.key, 'UTF8')), 'hex'), 16)
            ORDER BY low DESC LIMIT 1
        ) AS heir ON true;
    IF keyless IS NOT NULL THEN
        RAISE EXCEPTION 'no key' USING ERRCODE = 'QD006', DETAIL = keyless;
    END IF;
    RETURN nullif(routed, names);
END
$$;

-- Let messages of which some name shards go to the open shards of their keys: lock those, and
-- return the queues; NULL if they are the same. Listeners are notified, because the sender names
-- other queues.
CREATE FUNCTION {schema}.lock_open(of_app text, names text[], keys text[]) RETURNS text[]
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    next text[];
    found text[];
BEGIN
    LOOP
        next := {schema}.route(of_app, names, keys);
        EXIT WHEN next IS NULL;  -- none of the locked ones is sealed
        names := next;
        found := next;
        PERFORM {schema}.lock_queues(of_app, names, NULL);
        PERFORM pg_notify({schema}.channel(of_app), '');
    END LOOP;
    RETURN found;
END
$$;

-- Append messages to their queues; return the position of the first. The others follow it in the
-- given order.
CREATE OR REPLACE FUNCTION {schema}.append(
    of_app text, names text[], keys text[], headers text[], bodies bytea[], lock_ms integer
) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    count bigint := cardinality(names);
    own_xid bigint := pg_current_xact_id()::text::bigint;
    first bigint;
    longest_key integer;
    longest_head integer := 0;
    longest_body integer := (SELECT max(octet_length(body)) FROM unnest(bodies) AS body);
BEGIN
    IF keys IS NOT NULL OR headers IS NOT NULL THEN
        SELECT max(length(key)), coalesce(max(octet_length(head)), 0)
            INTO longest_key, longest_head FROM unnest(keys, headers) AS given(key, head);
    END IF;
    -- As the checks of other tables; here, they would take 6 us for each call.
    IF longest_body > 67108864 OR longest_head > 131072 OR longest_key > 1000 THEN
        RAISE EXCEPTION 'a message is too large' USING ERRCODE = 'check_violation';
    END IF;
    IF {schema}.lock_queues(of_app, names, lock_ms) THEN
        names := coalesce({schema}.lock_open(of_app, names, keys), names);
    END IF;
    LOCK TABLE ONLY {schema}.messages IN ROW EXCLUSIVE MODE;  -- `drop_partitions` waits for it
    first := {schema}.reserve(count);
    PERFORM {schema}.add_partition(first);
    IF count > 1 THEN
        PERFORM {schema}.add_partition(first + count - 1);
    END IF;
    INSERT INTO {schema}.messages (queue, position, xid, key, headers, body)
        SELECT queues.id, first + place - 1, own_xid, given.key, given.head, given.body
        FROM unnest(names, keys, headers, bodies)
            WITH ORDINALITY AS given(name, key, head, body, place)
        JOIN {schema}.queues ON app = of_app AND queues.name = given.name;
    -- Rare, because sizes are rounded up to powers of two: a new version of the row is dead weight.
    IF longest_body + longest_head > 4096 THEN
        UPDATE {schema}.queues SET largest = sizes.size FROM (
            SELECT name, (2 ^ ceil(log(2, max(bytes))))::integer AS size FROM (
                SELECT name, octet_length(body) + coalesce(octet_length(head), 0) AS bytes
                FROM unnest(names, bodies, headers) AS given(name, body, head)
            ) AS given WHERE bytes > 4096 GROUP BY name
        ) AS sizes WHERE app = of_app AND queues.name = sizes.name AND largest < sizes.size;
    END IF;
    RETURN first;
END
$$;

-- Send messages, some with an id of their own, a due time (position), or a deduplication key;
-- return their ids. A message with a due time has an id.
CREATE OR REPLACE FUNCTION {schema}.send(
    of_app text, names text[], keys text[], headers text[], bodies bytea[], ids text[],
    dues bigint[], dedup_keys text[], dedup_ticks bigint[], lock_ms integer
) RETURNS text[]
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    sent text[] := ARRAY[]::text[];
    now bigint;
    own bigint;
    keeper bigint;
    place bigint;
    known text;
    id text;
    digest bytea;
BEGIN
    IF {schema}.lock_queues(of_app, names, lock_ms) THEN
        names := coalesce({schema}.lock_open(of_app, names, keys), names);
    END IF;
    now := {schema}.clock();  -- once, or a later message of the same due time could be sent first
    FOR i IN 1 .. cardinality(names) LOOP
        SELECT queues.id, root INTO own, keeper
            FROM {schema}.queues WHERE app = of_app AND name = names[i];
        IF dedup_keys[i] IS NOT NULL THEN
            IF dedup_ticks[i] NOT BETWEEN 0 AND 316224000000000 THEN  -- 366 days
                RAISE EXCEPTION 'the window of a deduplication key is too long'
                    USING ERRCODE = 'invalid_parameter_value';
            END IF;
            digest := sha256(convert_to(length(session_user) || ':' || session_user
                || CASE WHEN keeper IS NULL THEN '' ELSE {schema}.key_hash(keys[i]) END
                || dedup_keys[i], 'UTF8'));
            keeper := coalesce(keeper, own);  -- it outlives a shard
            SELECT dedup.id INTO known FROM {schema}.dedup
                WHERE queue = keeper AND key = digest AND until > now;
            IF FOUND THEN
                sent := sent || known;
                CONTINUE;
            END IF;
        END IF;
        id := ids[i];
        IF dues[i] > now THEN
            INSERT INTO {schema}.delayed (app, due, queue, key, headers, body)
                VALUES (of_app, dues[i], own, keys[i], headers[i], bodies[i]);
        ELSE
            place := {schema}.append(of_app, names[i:i], keys[i:i], headers[i:i], bodies[i:i],
                NULL);
            id := coalesce(id, {schema}.message_id(place));
        END IF;
        IF dedup_keys[i] IS NOT NULL THEN
            DELETE FROM {schema}.dedup WHERE (queue, key) IN (
                SELECT queue, key FROM {schema}.dedup WHERE until <= now ORDER BY until
                LIMIT 16 FOR UPDATE SKIP LOCKED);
            INSERT INTO {schema}.dedup (queue, key, id, until)
                VALUES (keeper, digest, id, now + dedup_ticks[i])
                ON CONFLICT (queue, key) DO UPDATE SET id = excluded.id, until = excluded.until;
        END IF;
        sent := sent || id;
    END LOOP;
    RETURN sent;
END
$$;

-- Return the position of the newest message of a queue behind a position, that one without any.
CREATE FUNCTION {schema}.newest(of_queue bigint, after bigint) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp
SET plan_cache_mode = force_custom_plan AS $$
DECLARE
    span record;
    found bigint;
BEGIN
    FOR span IN
        SELECT lag(last, 1, after) OVER (ORDER BY last) AS first, last
        FROM {schema}.spans(after) AS last ORDER BY last DESC
    LOOP
        BEGIN
            SELECT max(position) INTO found FROM {schema}.messages
                WHERE queue = of_queue AND position > span.first AND position <= span.last;
            RAISE EXCEPTION 'found' USING ERRCODE = 'QD000';  -- gives up the locks
        EXCEPTION WHEN SQLSTATE 'QD000' THEN
            IF found IS NOT NULL THEN
                RETURN found;
            END IF;
        END;
    END LOOP;
    RETURN after;
END
$$;

-- Store the first shards of a stream unless it has some, or seal parents and store children.
CREATE FUNCTION {schema}.add_shards(
    of_app text, of_stream text, of_parents text[], names text[], lows text[], highs text[]
) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    most integer;
    taken text;
    parent record;
    of_root bigint;
BEGIN
    INSERT INTO {schema}.apps (name) VALUES (of_app) ON CONFLICT DO NOTHING;
    SELECT max_queues INTO most FROM {schema}.apps WHERE name = of_app FOR NO KEY UPDATE;
    IF of_parents = '{}' AND EXISTS (
        SELECT FROM {schema}.streams WHERE app = of_app AND stream = of_stream
    ) THEN
        RETURN;
    END IF;
    SELECT name INTO taken FROM {schema}.queues
        WHERE app = of_app AND name = ANY (names) LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'the queue exists' USING ERRCODE = 'QD007', DETAIL = taken;
    END IF;
    IF most < cardinality(names) + (SELECT count(*) FROM {schema}.queues WHERE app = of_app) THEN
        RAISE EXCEPTION 'too many queues'
            USING ERRCODE = 'QD001', DETAIL = names[1], HINT = most;
    END IF;
    PERFORM FROM {schema}.queues WHERE app = of_app AND name = ANY (of_parents)
        ORDER BY id FOR NO KEY UPDATE;
    FOR parent IN
        SELECT given.name, id, trimmed, root FROM unnest(of_parents) AS given(name)
        LEFT JOIN {schema}.queues ON app = of_app AND queues.name = given.name
    LOOP
        UPDATE {schema}.streams SET end_position = {schema}.newest(parent.id, parent.trimmed)
            WHERE app = of_app AND queue = parent.name AND end_position IS NULL;
        IF NOT FOUND OR parent.id IS NULL THEN
            RAISE EXCEPTION 'sealed' USING ERRCODE = 'QD005', DETAIL = parent.name;
        END IF;
        of_root := parent.root;
        -- A transaction at REPEATABLE READ whose snapshot has no seal fails at this row's lock.
        UPDATE {schema}.queues SET root = root WHERE id = parent.id;
    END LOOP;
    INSERT INTO {schema}.queues (app, name, root)
        SELECT of_app, name, of_root FROM unnest(names) WITH ORDINALITY AS given(name, place)
        ORDER BY place;
    UPDATE {schema}.queues SET root = (
            SELECT min(id) FROM {schema}.queues WHERE app = of_app AND name = ANY (names))
        WHERE app = of_app AND name = ANY (names) AND root IS NULL;
    INSERT INTO {schema}.streams (app, stream, queue, low, high, parents, hidden)
        SELECT of_app, of_stream, given.name, given.low, given.high, of_parents, of_parents <> '{}'
        FROM unnest(names, lows, highs) WITH ORDINALITY AS given(name, low, high, place)
        ORDER BY place;
END
$$;

-- Senders may create streams, but not divide them.
CREATE FUNCTION {schema}.create_stream(
    of_app text, of_stream text, names text[], lows text[], highs text[]
) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM {schema}.add_shards(of_app, of_stream, '{}', names, lows, highs);
END
$$;

-- Show hidden shards to workers.
CREATE FUNCTION {schema}.open_shards(of_app text, names text[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE {schema}.streams SET hidden = false WHERE app = of_app AND queue = ANY (names);
END
$$;

-- Delete a queue with its messages up to a position. Return the number of later and delayed
-- messages and dead letters that keep it from being deleted.
CREATE OR REPLACE FUNCTION {schema}.delete_queue(
    of_app text, of_queue text, done bigint,
    OUT waiting bigint, OUT later bigint, OUT dead bigint
)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    own record;
BEGIN
    waiting := 0; later := 0; dead := 0;
    SELECT id, trimmed, root INTO own FROM {schema}.queues WHERE app = of_app AND name = of_queue
        FOR UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    SELECT total INTO waiting
        FROM {schema}.count_messages(own.id, greatest(done, own.trimmed), 9223372036854775807);
    SELECT count(*) INTO later FROM {schema}.delayed WHERE queue = own.id;
    SELECT count(*) INTO dead FROM {schema}.dead_letters WHERE queue = own.id;
    IF waiting + later + dead > 0 THEN
        RETURN;
    END IF;
    DELETE FROM {schema}.dedup WHERE queue = own.id AND own.root IS NULL;
    DELETE FROM {schema}.queues WHERE id = own.id;
END
$$;

REVOKE ALL ON ALL FUNCTIONS IN SCHEMA {schema} FROM PUBLIC;
UPDATE {schema}.about SET format = 3;

-- Format 4: the coordinator, see `qdo.coordination.sql`. The row of `tree` is locked by each write.
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
UPDATE {schema}.about SET format = 4;

-- Format 5: the functions are replaced as a whole; `functions` is their digest.
ALTER TABLE {schema}.about ADD functions text NOT NULL DEFAULT '';
ALTER TABLE {schema}.streams ADD is_first boolean;
CREATE UNIQUE INDEX streams_once ON {schema}.streams (app, stream) WHERE is_first;
DROP FUNCTION IF EXISTS {schema}.create_stream(text, text, text[], text[], text[]);
DROP FUNCTION IF EXISTS {schema}.add_shards(text, text, text[], text[], text[], text[]);

-- A request belongs to the role that asked for it, those of earlier formats to all. A pool is known
-- while it has requests that wait; without a unique name, no sender waits for an open transaction.
ALTER TABLE {schema}.requests ADD asker text;
ALTER TABLE {schema}.requests ALTER asker SET DEFAULT session_user;
CREATE TABLE {schema}.pools (app text NOT NULL, name text NOT NULL);
CREATE INDEX pools_named ON {schema}.pools (app, name);
DROP FUNCTION IF EXISTS {schema}.mark_request(text, text, text);

-- Each text and number that a role can store has a bound, whichever program stores it: readers take
-- rows whole, and increase numbers. NOT VALID, so that rows of earlier formats stop no upgrade.
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
            'asked, due, state, take, failed, started, keep, until'],
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
        EXECUTE format('ALTER TABLE {schema}.%I ADD CONSTRAINT bounds CHECK (%s) NOT VALID', bound[1],
            concat_ws(' AND ', nullif(bound[2], ''), CASE WHEN bound[3] <> '' THEN format(
                'least(%1$s) >= 0 AND greatest(%1$s) < 4611686018427387904', bound[3]) END));
    END LOOP;
END
$$;
UPDATE {schema}.about SET format = 5;

-- The functions of PostgreSQL, each once, as this version needs them; `schema.py` explains them. Each
-- `qdo admin broker init` with another version replaces all of them. They run with the rights of the
-- schema's owner: each names what it uses with its schema.

-- The present as a position: 100 ns intervals since 1582-10-15. Functions in PL/pgSQL keep their
-- plans; those in SQL are planned at each call, which took longer than all else in a send.
CREATE OR REPLACE FUNCTION {schema}.clock() RETURNS bigint
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
CREATE OR REPLACE FUNCTION {schema}.reserve(count bigint) RETURNS bigint
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
CREATE OR REPLACE FUNCTION {schema}.add_partition(place bigint) RETURNS void
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

-- Create the present partition and the next two, unless they exist. Workers do so in advance, and in
-- a transaction of its own: others wait for the end of a sender's that has created one.
CREATE OR REPLACE FUNCTION {schema}.add_partitions() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET lock_timeout = '200ms' AS $$
DECLARE
    ticks bigint := (SELECT partition_ticks FROM {schema}.about);
BEGIN
    FOR further IN 0 .. 2 LOOP
        PERFORM {schema}.add_partition({schema}.clock() + further * ticks);
    END LOOP;
EXCEPTION WHEN lock_not_available THEN  -- a later call adds them
END
$$;

-- The chores of workers: create partitions, and delete deduplication keys that are over since a time;
-- return the time up to which it has, and whether more are over. While any transaction of the server
-- stays open, the index entries of deleted keys stay: each call begins where the last one has ended.
-- A minute later, so that transactions with short windows have committed. Rows are deleted by their
-- place: by their key, the planner may compare all rows of the table with those found.
CREATE OR REPLACE FUNCTION {schema}.tidy(since bigint, OUT upto bigint, OUT is_rest boolean)
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET enable_seqscan = off AS $$
DECLARE
    latest bigint := {schema}.clock() - 600000000;
BEGIN
    PERFORM {schema}.add_partitions();
    WITH gone AS (
        DELETE FROM {schema}.dedup WHERE ctid = ANY (ARRAY(
            SELECT ctid FROM {schema}.dedup WHERE until >= since AND until <= latest
            ORDER BY until LIMIT 10000 FOR UPDATE SKIP LOCKED))
        RETURNING until
    ) SELECT max(until), count(*) = 10000 INTO upto, is_rest FROM gone;
    upto := CASE WHEN is_rest THEN upto ELSE latest END;
END
$$;

-- Divide the partitions behind a position into spans of 50; return the last position of each. A
-- session has too few locks to open thousands of partitions, which a blocked queue keeps.
CREATE OR REPLACE FUNCTION {schema}.spans(after bigint) RETURNS SETOF bigint
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
CREATE OR REPLACE FUNCTION {schema}.count_messages(
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
CREATE OR REPLACE FUNCTION {schema}.limit_queues(of_app text, most integer) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF most IS DISTINCT FROM (SELECT max_queues FROM {schema}.apps WHERE name = of_app) THEN
        INSERT INTO {schema}.apps (name, max_queues) VALUES (of_app, most)
            ON CONFLICT (name) DO UPDATE SET max_queues = excluded.max_queues;
    END IF;
END
$$;

-- Record which fleet processes an app, unless another one is recorded; return the recorded one.
CREATE OR REPLACE FUNCTION {schema}.claim_app(of_app text, of_fleet text, of_root text) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    known text := (SELECT fleet FROM {schema}.apps WHERE name = of_app);
BEGIN
    IF known IS NULL THEN
        INSERT INTO {schema}.apps (name, fleet, root) VALUES (of_app, of_fleet, of_root)
            ON CONFLICT (name) DO UPDATE SET fleet = coalesce(apps.fleet, excluded.fleet),
                root = CASE WHEN apps.fleet IS NULL THEN excluded.root ELSE apps.root END
            RETURNING fleet INTO known;
    END IF;
    RETURN known;
END
$$;

-- End transactions of a sender that are idle, because others wait for what they lock. Only some roles
-- may set this for others.
CREATE OR REPLACE FUNCTION {schema}.limit_idle(role regrole) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_db_role_setting WHERE setrole = role
            AND setconfig::text LIKE '%idle_in_transaction_session_timeout=%') THEN
        EXECUTE format('ALTER ROLE %s SET idle_in_transaction_session_timeout = 600000', role);
    END IF;
EXCEPTION WHEN insufficient_privilege THEN
    RAISE WARNING 'set idle_in_transaction_session_timeout for % as a role that may alter it', role;
END
$$;

-- The id of the message at a position: its UUID version 1.
CREATE OR REPLACE FUNCTION {schema}.message_id(place bigint) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT lpad(to_hex(place & 4294967295), 8, '0')
        || '-' || lpad(to_hex((place >> 32) & 65535), 4, '0')
        || '-' || lpad(to_hex(((place >> 48) & 4095) | 4096), 4, '0')
        || '-8000-' || lpad(to_hex(node), 12, '0') FROM {schema}.about
$$;

-- Keep messages until the transaction commits, which then sends them; see `send`. The node tells
-- this schema from one of the same name in another database.
CREATE OR REPLACE FUNCTION {schema}.stage(
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
        SELECT of_app, name, key, head, body, id,
            CASE WHEN due < 0 THEN {schema}.clock() - due ELSE due END, dedup_key, ticks
        FROM unnest(names, keys, stage.headers, bodies, ids, dues, dedup_keys, stage.dedup_ticks)
            AS given(name, key, head, body, id, due, dedup_key, ticks);
END
$$;

-- The last step of a transaction before its commit, so that it holds its locks for a moment only,
-- however long it was open. The first message sends all: locks are taken in one order.
CREATE OR REPLACE FUNCTION {schema}.send_staged() RETURNS trigger
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
        IF FOUND OR NOT EXISTS (SELECT FROM {schema}.apps WHERE name = sending.app) THEN
            PERFORM pg_notify({schema}.channel(sending.app), 'again');
        END IF;
    END LOOP;
    DELETE FROM {schema}.outgoing WHERE xid = own_xid;
    RETURN NULL;
END
$$;

DROP TRIGGER IF EXISTS send_staged ON {schema}.outgoing;
CREATE CONSTRAINT TRIGGER send_staged AFTER INSERT ON {schema}.outgoing
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION {schema}.send_staged();
-- Also for sessions with session_replication_role = replica, as those that load many rows.
ALTER TABLE {schema}.outgoing ENABLE ALWAYS TRIGGER send_staged;

-- The name under which listeners of an app are notified; names of channels have 63 bytes.
CREATE OR REPLACE FUNCTION {schema}.channel(of_app text) RETURNS text
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
CREATE OR REPLACE FUNCTION {schema}.move_due(of_app text, most integer, most_bytes bigint) RETURNS bigint
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
        -- All queues are locked, or too many: any of them, or one could keep others back.
        IF asked IS NULL OR cardinality(locked) > most THEN
            free := ARRAY[locked[1 + floor(random() * cardinality(locked))]];
            PERFORM FROM {schema}.queues WHERE id = ANY (free) FOR NO KEY UPDATE;
            EXIT;
        END IF;
        WITH goals AS (  -- the messages of a sealed shard go to those that are open
            SELECT id, id AS goal FROM {schema}.queues WHERE id = ANY (asked)
            UNION SELECT queues.id, heirs.id FROM {schema}.queues
                JOIN {schema}.streams AS own ON own.app = of_app AND own.queue = queues.name
                JOIN {schema}.streams AS open ON open.app = of_app AND open.stream = own.stream
                JOIN {schema}.queues AS heirs ON heirs.app = of_app AND heirs.name = open.queue
                WHERE queues.id = ANY (asked) AND own.end_position IS NOT NULL
                    AND open.end_position IS NULL
        ), got AS (
            SELECT id FROM {schema}.queues WHERE id IN (SELECT goal FROM goals)
            ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
        ) SELECT array_agg(id) INTO free FROM (
            SELECT goals.id FROM goals LEFT JOIN got ON got.id = goal
            GROUP BY goals.id HAVING bool_and(got.id IS NOT NULL)) AS found;
        EXIT WHEN free IS NOT NULL;
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
        PERFORM {schema}.deliver(of_app, names, keys, heads, bodies);
    END IF;
    RETURN coalesce(cardinality(names), 0);
END
$$;

-- Append messages that are due. Each that the server refuses becomes a dead letter of its queue, and
-- delays no other. What was accepted when it was sent may be refused now: its queue may be a shard.
CREATE OR REPLACE FUNCTION {schema}.deliver(
    of_app text, names text[], keys text[], heads text[], bodies bytea[]
) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    half integer := cardinality(names) / 2;
BEGIN
    PERFORM {schema}.append(of_app, names, keys, heads, bodies, NULL);
EXCEPTION WHEN OTHERS THEN
    IF SQLSTATE !~ '^(22|23|QD)' THEN  -- not for what is in a message
        RAISE;
    END IF;
    IF half > 0 THEN  -- a search by halves keeps the order
        PERFORM {schema}.deliver(of_app, names[:half], keys[:half], heads[:half], bodies[:half]);
        PERFORM {schema}.deliver(of_app, names[half + 1:], keys[half + 1:], heads[half + 1:],
            bodies[half + 1:]);
        RETURN;
    END IF;
    INSERT INTO {schema}.dead_letters
        SELECT id, {schema}.reserve(1), bodies[1], keys[1], heads[1],
            'refused when it was due: ' || SQLERRM, '', 0, '', 0, {schema}.unix_time()
        FROM {schema}.queues WHERE app = of_app AND name = names[1];
    RAISE WARNING 'a delayed message of queue % is a dead letter now: it was refused when it was due: %',
        names[1], SQLERRM USING ERRCODE = 'QD008';
END
$$;

-- Return the queues with messages, or with first messages, of transactions that were not visible
-- in an earlier snapshot, and the present snapshot: its first transaction that has not begun, and
-- those in progress. Messages up to `since` are old; partitions with no others are not opened. With
-- it the time until the next delayed message is due, in ticks, and the last position and the end of
-- the log on disk, both of which decrease only if the server lost committed transactions.
CREATE OR REPLACE FUNCTION {schema}.look(
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
CREATE OR REPLACE FUNCTION {schema}.advance(seen bigint) RETURNS void
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
CREATE OR REPLACE FUNCTION {schema}.trim(of_app text, of_queue text, done bigint, older_ticks bigint)
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
-- drops happen under the lock, which excludes all readers and writers. The lock timeout keeps a
-- transaction that uses a partition from blocking all others behind the drop.
CREATE OR REPLACE FUNCTION {schema}.drop_partitions() RETURNS text[]
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
    PERFORM {schema}.add_partitions();
    BEGIN
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
    EXCEPTION WHEN lock_not_available THEN
        dropped := ARRAY[]::text[];
    END;
    RETURN dropped;
END
$$;

-- Store a dead letter unless its position has one.
CREATE OR REPLACE FUNCTION {schema}.bury(
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

CREATE OR REPLACE FUNCTION {schema}.unix_time() RETURNS float8
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN extract(epoch FROM clock_timestamp());
END
$$;

-- Return whether the session may know and change a request: its role has asked for it, is a member
-- of the role that has, or reads all requests.
CREATE OR REPLACE FUNCTION {schema}.is_asker(asker text) RETURNS boolean
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN asker = session_user
        OR has_table_privilege(session_user, '{schema}.requests', 'SELECT')
        OR EXISTS (SELECT FROM pg_roles
            WHERE rolname = asker AND pg_has_role(session_user, oid, 'USAGE'));
END
$$;

-- Delete requests and their steps, and theirs: a later request with the same id must not find them.
-- Return the number.
CREATE OR REPLACE FUNCTION {schema}.delete_requests(of_app text, of_ids text[]) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    steps text[];
    gone bigint := 0;
    count bigint;
BEGIN
    WHILE of_ids <> '{}' LOOP
        steps := ARRAY(SELECT id FROM {schema}.requests WHERE app = of_app AND parent = ANY (of_ids));
        DELETE FROM {schema}.requests WHERE app = of_app AND id = ANY (of_ids);
        GET DIAGNOSTICS count = ROW_COUNT;
        gone := gone + count;
        of_ids := steps;
    END LOOP;
    RETURN gone;
END
$$;

-- Store requests unless their ids are known; return for each whether it was new. With a node, the
-- transaction is one of the app, and notifies at its commit; see `stage`. A due time or deadline
-- below 0 is a delay. An app has as many pools as queues at most. Requests with the state 2 wait for
-- an answer. NULL instead of each of the last three arrays stands for default values.
CREATE OR REPLACE FUNCTION {schema}.ask_requests(
    of_node bigint, of_app text, pools text[], ids text[], priorities integer[], dues float8[],
    replies text[], keeps float8[], digests bytea[], heads text[], bodies bytea[], parents text[],
    deadlines float8[], states integer[], lock_ms integer
) RETURNS boolean[]
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    now float8 := {schema}.unix_time();
    fresh text[] := ARRAY[]::text[];
    is_other boolean;
    opened text[];
    most bigint;
    added text[];
    missing bigint;
    other text;
BEGIN
    SELECT node <> of_node, ARRAY(
        SELECT pool FROM unnest(pools) AS given(pool) WHERE NOT EXISTS (
            SELECT FROM {schema}.pools WHERE app = of_app AND name = pool))
        INTO is_other, opened FROM {schema}.about;  -- one statement: each takes 15 us
    IF is_other THEN
        RAISE EXCEPTION 'another schema' USING ERRCODE = 'QD002';
    END IF;
    PERFORM set_config('qdo.staged', CASE WHEN of_node IS NULL THEN 'off' ELSE 'on' END, true);
    IF lock_ms IS NOT NULL THEN
        PERFORM set_config('lock_timeout', lock_ms::text, true);
    END IF;
    IF opened <> '{}' THEN
        INSERT INTO {schema}.pools SELECT DISTINCT of_app, unnest(opened);
        most := coalesce((SELECT max_queues FROM {schema}.apps WHERE name = of_app), 100000);
        IF (SELECT count(DISTINCT name) FROM {schema}.pools WHERE app = of_app) > most THEN
            RAISE EXCEPTION 'too many pools'
                USING ERRCODE = 'QD001', DETAIL = opened[1], HINT = most;
        END IF;
    END IF;
    LOOP
        WITH new AS (
            INSERT INTO {schema}.requests
                (app, pool, id, priority, asked, due, reply, keep, digest, headers, body, parent,
                    deadline, state)
                SELECT of_app, given.pool, given.id, given.priority, now,
                    CASE WHEN given.due < 0 THEN now - given.due ELSE given.due END,
                    given.reply, given.keep, given.digest, given.head, given.body, given.parent,
                    CASE WHEN given.deadline < 0 THEN now - given.deadline
                        ELSE coalesce(given.deadline, 0) END, coalesce(given.state, 0)
                FROM unnest(pools, ids, priorities, dues, replies, keeps, digests, heads, bodies,
                    parents, deadlines, states) WITH ORDINALITY AS given(
                        pool, id, priority, due, reply, keep, digest, head, body, parent, deadline,
                        state, place)
                ORDER BY given.place
                ON CONFLICT DO NOTHING RETURNING id
        ) SELECT array_agg(id) INTO added FROM new;
        fresh := fresh || added;
        IF cardinality(fresh) = cardinality(ids) THEN
            RETURN array_fill(true, ARRAY[cardinality(ids)]);
        END IF;
        CONTINUE WHEN {schema}.delete_requests(of_app, ARRAY(
            SELECT id FROM {schema}.requests AS known
            WHERE app = of_app AND id = ANY (ids) AND id <> ALL (coalesce(fresh, '{}')) AND state > 2
                AND until <= {schema}.unix_time() AND {schema}.is_asker(known.asker)
            FOR UPDATE)) > 0;
        SELECT count(*) FILTER (WHERE known.id IS NULL),
            min(given.id) FILTER (
                WHERE known.digest <> given.digest OR NOT {schema}.is_asker(known.asker))
            INTO missing, other
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
CREATE OR REPLACE FUNCTION {schema}.tell_of_requests() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM FROM {schema}.apps WHERE name = NEW.app FOR NO KEY UPDATE SKIP LOCKED;
    IF FOUND OR NOT EXISTS (SELECT FROM {schema}.apps WHERE name = NEW.app) THEN
        PERFORM pg_notify({schema}.channel(NEW.app), 'again');
    END IF;
    RETURN NULL;
END
$$;

DROP TRIGGER IF EXISTS tell_of_requests ON {schema}.requests;
CREATE CONSTRAINT TRIGGER tell_of_requests AFTER INSERT ON {schema}.requests
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
    WHEN (current_setting('qdo.staged', true) = 'on')
    EXECUTE FUNCTION {schema}.tell_of_requests();
ALTER TABLE {schema}.requests ENABLE ALWAYS TRIGGER tell_of_requests;

-- Return how many index entries this transaction has read to find requests to take.
CREATE OR REPLACE FUNCTION {schema}.request_entries() RETURNS bigint
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
-- As many places as `oldest_places` go to the oldest requests of any priority. Those are not locked
-- before they are chosen: others may take the first ones of each priority. The condition `state < 1`
-- matches no index, or the planner might search by it instead of by the ids.
-- A request whose body is NULL, which only SQL can store, is taken with an empty one, and fails.
CREATE OR REPLACE FUNCTION {schema}.take_requests(
    of_app text, of_owner text, of_pool text, places integer, running text[], most_bytes bigint,
    since float8, passed bigint[], is_whole boolean, oldest_places integer
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
    aged text[] := '{}';
    chosen text[];
    last bigint[];
    is_rest boolean;
BEGIN
    IF oldest_places > 0 THEN
        aged := ARRAY(
            SELECT id FROM {schema}.requests WHERE app = of_app AND state < 1 AND id = ANY (ARRAY(
                SELECT found.id FROM generate_series(0, 9) AS given(priority) CROSS JOIN LATERAL (
                    SELECT id, number FROM {schema}.requests
                    WHERE app = of_app AND pool = of_pool AND state = 0 AND due <= now
                        AND priority = given.priority
                        AND number > CASE WHEN is_whole THEN 0 ELSE passed[given.priority + 1] END
                    ORDER BY number LIMIT oldest_places
                ) AS found ORDER BY found.number LIMIT oldest_places))
            FOR UPDATE SKIP LOCKED);
    END IF;
    WITH own AS MATERIALIZED (
        SELECT id, -1 AS priority, number, coalesce(octet_length(body), 0) AS size FROM {schema}.requests
        WHERE app = of_app AND owner = of_owner AND state IN (1, 2)
            AND started >= CASE WHEN is_whole THEN 0 ELSE since END
            AND pool = of_pool AND id <> ALL (running)
        FOR UPDATE SKIP LOCKED
    ), oldest AS (
        SELECT id, -1 AS priority, number, coalesce(octet_length(body), 0) AS size FROM {schema}.requests
        WHERE app = of_app AND id = ANY (aged)
    ), next AS MATERIALIZED (
        SELECT found.* FROM generate_series(0, 9) AS given(priority) CROSS JOIN LATERAL (
            SELECT id, priority, number, coalesce(octet_length(body), 0) AS size FROM {schema}.requests
            WHERE app = of_app AND pool = of_pool AND state = 0 AND due <= now
                AND priority = given.priority
                AND number > CASE WHEN is_whole THEN 0 ELSE passed[given.priority + 1] END
                AND id <> ALL (aged)
            ORDER BY number LIMIT places - cardinality(aged) FOR UPDATE SKIP LOCKED
        ) AS found LIMIT places - cardinality(aged)
    ), sized AS (
        SELECT *, sum(size) OVER (ORDER BY priority, number) - size < most_bytes AS fits
        FROM (SELECT * FROM own UNION ALL SELECT * FROM oldest UNION ALL SELECT * FROM next) AS found
    )
    SELECT array_agg(id) FILTER (WHERE fits),
        max(ARRAY[priority, number]) FILTER (WHERE fits AND priority >= 0),
        count(*) FILTER (WHERE priority >= 0) = places - cardinality(aged) OR count(*) FILTER (WHERE NOT fits) > 0
        INTO chosen, last, is_rest FROM sized;
    IF chosen IS NOT NULL THEN
        RETURN QUERY
        WITH taken AS (
            UPDATE {schema}.requests AS held
            SET state = 1, owner = of_owner, take = held.take + 1, started = now, note = NULL,
                mark = CASE WHEN held.mark LIKE '{"cancel"%' THEN held.mark END
            WHERE app = of_app AND id = ANY (chosen)
            RETURNING held.*
        )
        SELECT id, take, priority, failed, crashed, error, asked, reply, headers,
            coalesce(body, ''), NULL, NULL::float8, NULL::float8, NULL::bigint[], NULL::float8
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
-- that ends, also if it has ended it before. NULL lets failed attempts, due time and error stay; a
-- due time below 0 is a delay. A pause makes a mark of its own, which only its answer replaces.
CREATE OR REPLACE FUNCTION {schema}.report_requests(
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
    parents text[];
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
            mark = CASE WHEN given.state = 3 THEN NULL
                WHEN held.mark LIKE '{"cancel"%' OR given.state = 2 AND held.state = 2
                    THEN held.mark
                WHEN given.state = 2 THEN format('{"paused": %s}', {schema}.unix_time()) END,
            crashed = held.crashed AND coalesce(given.failed = held.failed, true),
            failed = coalesce(given.failed, held.failed),
            due = CASE WHEN given.due < 0 THEN {schema}.unix_time() - given.due
                ELSE coalesce(given.due, held.due) END,
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
        RETURNING given.place, CASE given.state WHEN 3 THEN held.parent END AS parent
    ) SELECT array_agg(place), array_agg(DISTINCT parent) FILTER (WHERE parent IS NOT NULL)
        INTO valid, parents FROM changed;
    IF parents IS NOT NULL THEN
        PERFORM {schema}.wake_requests(of_app, parents);
    END IF;
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

-- Let suspended requests wait again that have no open steps. The lock makes the ends of the last two
-- steps, and the suspension, see each other: each statement sees what is committed by then.
CREATE OR REPLACE FUNCTION {schema}.wake_requests(of_app text, of_ids text[]) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
BEGIN
    PERFORM FROM {schema}.requests WHERE app = of_app AND id = ANY (of_ids)
        ORDER BY id FOR NO KEY UPDATE;
    UPDATE {schema}.requests AS held SET state = 0, due = {schema}.unix_time(), note = NULL
        WHERE app = of_app AND id = ANY (of_ids) AND state + 0 = 2 AND owner = '' AND take > 0
            AND NOT EXISTS (SELECT FROM {schema}.requests AS step
                WHERE app = of_app AND step.parent = held.id AND step.state < 3);
    IF FOUND THEN
        PERFORM pg_notify({schema}.channel(of_app), 'again');
    END IF;
END
$$;

-- Let a running request wait for its steps, without an owner; return whether its take was valid.
CREATE OR REPLACE FUNCTION {schema}.suspend_request(
    of_app text, of_id text, of_owner text, of_take integer, of_note text
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE {schema}.requests SET state = 2, owner = '', note = of_note, failed = 0, crashed = false
        WHERE app = of_app AND id = of_id AND owner = of_owner AND take = of_take
            AND state BETWEEN 1 AND 2;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM {schema}.wake_requests(of_app, ARRAY[of_id]);
    RETURN true;
END
$$;

-- Cancel a request without an owner, with the number of its last take, or answer a question. Senders
-- may.
CREATE OR REPLACE FUNCTION {schema}.end_request(
    of_app text, of_id text, of_take integer, ending text, why text, head text, answer bytea,
    names text[], keys text[], headers text[], bodies bytea[], ids text[], dues bigint[],
    dedup_keys text[], dedup_ticks bigint[]
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN EXISTS (SELECT FROM {schema}.find_request(of_app, of_id)
            WHERE ending = 'cancelled' OR ending = 'done' AND state >= 2 AND take = 0)
        AND ({schema}.report_requests(
        of_app, ARRAY[of_id], ARRAY[''], ARRAY[of_take], ARRAY[3], NULL, NULL, NULL, ARRAY[why],
        ARRAY[ending], ARRAY[head], ARRAY[answer], ARRAY(SELECT 1 FROM unnest(names)), names, keys,
        headers, bodies, ids, dues, dedup_keys, dedup_ticks, NULL))[1];
END
$$;

-- Cancel a running or paused request, or answer the question `asked` of a paused one; return whether
-- it is one. One with steps gets the present time as its deadline instead, so that it may compensate.
CREATE OR REPLACE FUNCTION {schema}.mark_request(
    of_app text, of_id text, of_mark text, asked text DEFAULT NULL
) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF of_mark LIKE '{"cancel"%' AND EXISTS (
            SELECT FROM {schema}.requests WHERE app = of_app AND parent = of_id) THEN
        UPDATE {schema}.requests SET deadline = {schema}.unix_time()
            WHERE app = of_app AND id = of_id AND {schema}.is_asker(asker) AND state + 0 < 3;
        RETURN FOUND;
    END IF;
    UPDATE {schema}.requests AS held SET mark = of_mark
        WHERE app = of_app AND id = of_id AND {schema}.is_asker(asker) AND owner <> ''
            AND CASE WHEN of_mark LIKE '{"cancel"%' THEN state BETWEEN 1 AND 2
                ELSE state = 2 AND held.mark IS NOT DISTINCT FROM mark_request.asked
                    AND coalesce(held.mark, '{"paused"') LIKE '{"paused"%' END;
    RETURN FOUND;
END
$$;

-- Let a request wait again that is over and has its body, and is no step. What ended it before is an
-- older take. Delete the steps for which its job shall ask again.
CREATE OR REPLACE FUNCTION {schema}.retry_request(of_app text, of_id text, forget text[])
RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    UPDATE {schema}.requests SET state = 0, owner = '', take = take + 1, failed = 0,
        crashed = false, due = {schema}.unix_time(), note = NULL, error = NULL, outcome = NULL,
        result_headers = NULL, result = NULL, until = 0, deadline = 0
        WHERE app = of_app AND id = of_id AND state > 2 AND body IS NOT NULL AND parent IS NULL;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    DELETE FROM {schema}.requests
        WHERE app = of_app AND id = ANY (forget) AND parent IS NOT NULL;
    RETURN true;
END
$$;

-- Let the requests of a worker that is gone wait again; return their number.
CREATE OR REPLACE FUNCTION {schema}.give_back_requests(of_app text, of_owner text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    given bigint;
BEGIN
    UPDATE {schema}.requests SET state = 0, owner = '', failed = failed + 1, crashed = true,
        due = {schema}.unix_time(), note = NULL,
        mark = CASE WHEN mark LIKE '{"cancel"%' THEN mark END,
        error = format('worker %s died, or lost its session', of_owner)
        WHERE app = of_app AND owner = of_owner AND state IN (1, 2);
    GET DIAGNOSTICS given = ROW_COUNT;
    RETURN given;
END
$$;

-- Return a request to the role that has asked for it.
CREATE OR REPLACE FUNCTION {schema}.find_request(of_app text, of_id text) RETURNS SETOF {schema}.requests
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN QUERY SELECT * FROM {schema}.requests
        WHERE app = of_app AND id = of_id AND {schema}.is_asker(asker);
END
$$;

-- Delete those of the given requests that have failed; return their number.
CREATE OR REPLACE FUNCTION {schema}.discard_requests(of_app text, of_ids text[]) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN {schema}.delete_requests(of_app, ARRAY(
        SELECT id FROM {schema}.requests WHERE app = of_app AND id = ANY (of_ids)
            AND state > 2 AND outcome = 'failed' AND parent IS NULL FOR UPDATE));
END
$$;

-- Delete requests that are over and were kept as long as asked, but for failed ones; return their
-- number.
CREATE OR REPLACE FUNCTION {schema}.expire_requests(of_app text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET enable_seqscan = off SET jit = off
SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    now float8 := {schema}.unix_time();
    gone bigint;
BEGIN
    gone := {schema}.delete_requests(of_app, ARRAY(
        SELECT id FROM {schema}.requests
        WHERE app = of_app AND state = 3 AND outcome IS DISTINCT FROM 'failed' AND parent IS NULL
            AND until <= now ORDER BY until LIMIT 1000 FOR UPDATE SKIP LOCKED));
    DELETE FROM {schema}.pools WHERE app = of_app AND NOT EXISTS (
        SELECT FROM {schema}.requests WHERE app = of_app AND pool = name AND state = 0);
    RETURN gone;
END
$$;

-- Raise an error if an app would have more queues than it may. Calls do not see the queues of open
-- transactions, and do not wait for them: so 100 of each may be too many. One that creates more locks
-- the app until its end.
CREATE OR REPLACE FUNCTION {schema}.check_room(of_app text, wanted bigint, example text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    most integer;
BEGIN
    IF wanted + (SELECT count(*) FROM {schema}.queues WHERE app = of_app
            AND xid = pg_current_xact_id()::text::bigint) > 100 THEN
        PERFORM FROM {schema}.apps WHERE name = of_app FOR NO KEY UPDATE;
    END IF;
    SELECT max_queues INTO most FROM {schema}.apps WHERE name = of_app;
    IF wanted + (SELECT count(*) FROM {schema}.queues WHERE app = of_app) > coalesce(most, 100000) THEN
        RAISE EXCEPTION 'too many queues' USING ERRCODE = 'QD001', DETAIL = example, HINT = most;
    END IF;
END
$$;

-- Lock queues in the order of their ids; create those that do not exist, before any is locked.
-- So no two calls wait for each other: calls that create wait by name and have locked nothing yet,
-- and calls that lock wait by id, and do not see the queues of open transactions. Without `lock_ms`,
-- the lock timeout of the caller applies. Return whether one of them is a shard, or has the name of
-- one that does not exist; then none may be locked.
CREATE OR REPLACE FUNCTION {schema}.lock_queues(of_app text, names text[], lock_ms integer) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    wanted integer := CASE cardinality(names) WHEN 1 THEN 1
        ELSE (SELECT count(DISTINCT name) FROM unnest(names) AS name) END;
    found integer := 1;
    missing text;
    has_shards boolean;
BEGIN
    IF lock_ms IS NOT NULL THEN
        PERFORM set_config('lock_timeout', lock_ms::text, true);
    END IF;
    FOR round IN 1 .. 10 LOOP
        IF wanted > 1 THEN
            SELECT count(*) INTO found FROM {schema}.queues
                WHERE app = of_app AND name = ANY (names);
        END IF;
        IF found >= wanted THEN
            SELECT count(*), bool_or(root IS NOT NULL) INTO found, has_shards FROM (
                SELECT root FROM {schema}.queues
                WHERE app = of_app AND name = ANY (names) ORDER BY id FOR NO KEY UPDATE
            ) AS locked;
            IF found >= wanted THEN
                RETURN has_shards;
            END IF;
        END IF;
        IF EXISTS (SELECT FROM unnest(names) AS given(name)
                JOIN {schema}.streams ON app = of_app AND stream = {schema}.stream_of(given.name)
                LEFT JOIN {schema}.queues AS known ON known.app = of_app
                    AND known.name = given.name WHERE known.name IS NULL) THEN
            RETURN true;
        END IF;
        SELECT given.name INTO missing FROM unnest(names) AS given(name) WHERE NOT EXISTS (
            SELECT FROM {schema}.queues AS known WHERE app = of_app AND known.name = given.name
        ) LIMIT 1;
        IF missing IS NOT NULL THEN
            PERFORM {schema}.check_room(of_app, wanted - found, missing);
        END IF;
        INSERT INTO {schema}.queues (app, name)
            SELECT DISTINCT of_app, name FROM unnest(names) AS name ORDER BY name
            ON CONFLICT DO NOTHING;
        found := wanted;
    END LOOP;
    RAISE EXCEPTION 'these queues are deleted all the time' USING ERRCODE = 'lock_not_available';
END
$$;

-- Return the hash of a message's key, see `qdo.brokers.streams.key_hash`.
CREATE OR REPLACE FUNCTION {schema}.key_hash(key text) RETURNS text
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN left(encode(sha256(convert_to(key, 'UTF8')), 'hex'), 16);
END
$$;

-- Return the stream of a queue that is named like a shard, see `qdo.queues.stream_of`, else NULL.
CREATE OR REPLACE FUNCTION {schema}.stream_of(name text) RETURNS text
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN substring(name FROM
        '^([^.]+)\.(?:[0-9a-f]{2}){0,8}-(?:[0-9a-f]{2}){0,8}(?:\.[0-9]+)?$');
END
$$;

-- Return the queues of messages, with the open shard of its key for each that names a shard; NULL
-- if they are the same. A name tells a shard only if no queue has it: a shard may be deleted.
CREATE OR REPLACE FUNCTION {schema}.route(of_app text, names text[], keys text[]) RETURNS text[]
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    routed text[];
    keyless text;
BEGIN
    -- Without functions of its own for each message, which take 8 us each.
    WITH named AS MATERIALIZED (
        SELECT name, stream FROM (
            SELECT given.name, coalesce(own.stream, {schema}.stream_of(given.name)) AS stream
            FROM (SELECT DISTINCT name FROM unnest(names) AS name) AS given
            LEFT JOIN {schema}.streams AS own ON own.app = of_app AND own.queue = given.name
            WHERE NOT EXISTS (SELECT FROM {schema}.queues AS plain
                WHERE plain.app = of_app AND plain.name = given.name AND root IS NULL)
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
        RAISE EXCEPTION 'a message for %, a shard of a stream, must have a key', keyless
            USING ERRCODE = 'QD006', DETAIL = keyless;
    END IF;
    RETURN nullif(routed, names);
END
$$;

-- Let messages of which some name shards go to the open shards of their keys: lock those, and
-- return the queues; NULL if they are the same. Listeners are notified, because the sender names
-- other queues.
CREATE OR REPLACE FUNCTION {schema}.lock_open(of_app text, names text[], keys text[]) RETURNS text[]
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    next text[];
    found text[];
BEGIN
    FOR round IN 1 .. 10 LOOP
        next := {schema}.route(of_app, names, keys);
        IF next IS NULL THEN  -- none of the locked ones is sealed
            RETURN found;
        END IF;
        names := next;
        found := next;
        PERFORM {schema}.lock_queues(of_app, names, NULL);
        PERFORM pg_notify({schema}.channel(of_app), '');
    END LOOP;
    RAISE EXCEPTION 'the shards of a stream change all the time'
        USING ERRCODE = 'lock_not_available', DETAIL = names[1];
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

-- Send messages, some with an id of their own, a due time (position, or below 0 a delay in ticks), or
-- a deduplication key; return their ids. A message with a due time has an id.
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
            dedup_keys[i] := CASE WHEN keeper IS NULL THEN '' ELSE {schema}.key_hash(keys[i]) END
                || dedup_keys[i];
            digest := sha256(convert_to(dedup_keys[i], 'UTF8'));
            keeper := coalesce(keeper, own);  -- it outlives a shard
            -- With statistics of a time when all were over, the planner would take the index of
            -- `until`, and read all keys of all queues.
            SELECT dedup.id INTO known FROM {schema}.dedup
                WHERE queue = keeper AND key = digest AND until + 0 > now;
            IF FOUND THEN
                sent := sent || known;
                CONTINUE;
            END IF;
        END IF;
        id := ids[i];
        IF dues[i] < 0 THEN
            dues[i] := now - dues[i];
        END IF;
        IF dues[i] > now THEN
            INSERT INTO {schema}.delayed (app, due, queue, key, headers, body)
                VALUES (of_app, dues[i], own, keys[i], headers[i], bodies[i]);
        ELSE
            place := {schema}.append(of_app, names[i:i], keys[i:i], headers[i:i], bodies[i:i],
                NULL);
            id := coalesce(id, {schema}.message_id(place));
        END IF;
        IF dedup_keys[i] IS NOT NULL THEN
            INSERT INTO {schema}.dedup (queue, key, id, until)
                VALUES (keeper, digest, id, now + dedup_ticks[i])
                ON CONFLICT (queue, key) DO UPDATE SET id = excluded.id, until = excluded.until;
        END IF;
        sent := sent || id;
    END LOOP;
    RETURN sent;
END
$$;

-- Free the deduplication key of a message of which the job is over; see `send`.
CREATE OR REPLACE FUNCTION {schema}.free_key(
    of_app text, of_queue text, of_key text, dedup_key text, of_id text
) RETURNS void
LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
    DELETE FROM {schema}.dedup USING {schema}.queues
    WHERE app = of_app AND name = of_queue AND dedup.queue = coalesce(root, queues.id)
        AND key = sha256(convert_to(CASE WHEN root IS NULL THEN ''
            ELSE {schema}.key_hash(of_key) END || dedup_key, 'UTF8'))
        AND dedup.id = of_id
$$;

-- Return the position of the newest message of a queue behind a position, that one without any.
CREATE OR REPLACE FUNCTION {schema}.newest(of_queue bigint, after bigint) RETURNS bigint
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

-- Store the first shards of a stream unless it has some; or seal neighbors and store their child, or
-- one shard and store two, divided at a bound. As in `qdo.brokers.streams`, but no caller chooses
-- names or ranges: so the shards of a stream have each key once.
CREATE OR REPLACE FUNCTION {schema}.add_shards(
    of_app text, of_stream text, shards integer, of_parents text[], bound text
) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    taken text;
    parent record;
    of_root bigint;
    lows text[];
    highs text[];
    bounds text[];
    names text[];
BEGIN
    IF of_parents = '{}' THEN
        IF EXISTS (SELECT FROM {schema}.streams WHERE app = of_app AND stream = of_stream) THEN
            RETURN;
        END IF;
        IF (of_stream ~ '^[^.]+$' AND shards BETWEEN 1 AND 4096 AND shards & (shards - 1) = 0)
            IS NOT TRUE
        THEN
            RAISE EXCEPTION 'shards must be a power of two up to 4096 of a stream without a dot'
                USING ERRCODE = 'invalid_parameter_value';
        END IF;
        bounds := ARRAY(
            SELECT regexp_replace(lpad(to_hex(65536 / shards * place), 4, '0'), '(00)+$', '')
            FROM generate_series(0, shards - 1) AS place ORDER BY place) || ''::text;
    ELSE
        SELECT array_agg(low ORDER BY low), array_agg(high ORDER BY low) INTO lows, highs
            FROM {schema}.streams WHERE app = of_app AND queue = ANY (of_parents);
        bounds := array_remove(ARRAY[lows[1], bound, highs[cardinality(highs)]], NULL);
        IF lows IS NULL OR lows[2:] <> trim_array(highs, 1)
            OR (cardinality(lows) = 1) <> (bound IS NOT NULL)
            OR bound !~ '^([0-9a-f]{2}){0,7}([0-9a-f][1-9a-f]|[1-9a-f]0)$'
            OR NOT (bound COLLATE "C" > lows[1] AND (highs[1] = '' OR bound < highs[1]))
        THEN
            RAISE EXCEPTION 'shards must be neighbors, or one that is divided at a bound within it'
                USING ERRCODE = 'invalid_parameter_value';
        END IF;
    END IF;
    -- A range that returns gets a number: a name is a queue's node.
    names := ARRAY(SELECT of_stream || '.' || bounds[place] || '-' || bounds[place + 1]
        || CASE WHEN used > 0 THEN '.' || used + 1 ELSE '' END
        FROM generate_series(1, cardinality(bounds) - 1) AS place CROSS JOIN LATERAL (
            SELECT count(*) AS used FROM {schema}.streams WHERE app = of_app AND stream = of_stream
                AND low = bounds[place] AND high = bounds[place + 1]) AS known ORDER BY place);
    IF of_parents = '{}' THEN  -- only those that create this stream wait for each other
        INSERT INTO {schema}.streams (app, stream, queue, low, high, parents, hidden, is_first)
            VALUES (of_app, of_stream, names[1], '', bounds[2], '{}', false, true)
            ON CONFLICT (app, stream) WHERE is_first DO NOTHING;
        IF NOT FOUND THEN
            RETURN;
        END IF;
    END IF;
    SELECT name INTO taken FROM {schema}.queues
        WHERE app = of_app AND name = ANY (names) LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION 'the queue exists' USING ERRCODE = 'QD007', DETAIL = taken;
    END IF;
    PERFORM {schema}.check_room(of_app, cardinality(names), names[1]);
    PERFORM FROM {schema}.queues WHERE app = of_app AND name = ANY (of_parents)
        ORDER BY id FOR NO KEY UPDATE;
    FOR parent IN
        SELECT given.name, id, trimmed, root FROM unnest(of_parents) AS given(name)
        LEFT JOIN {schema}.queues ON app = of_app AND queues.name = given.name
    LOOP
        UPDATE {schema}.streams SET end_position = {schema}.newest(parent.id, parent.trimmed)
            WHERE app = of_app AND stream = of_stream AND queue = parent.name
                AND end_position IS NULL;
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
        SELECT of_app, of_stream, names[place], bounds[place], bounds[place + 1], of_parents,
            of_parents <> '{}' FROM generate_series(1, cardinality(names)) AS place
        WHERE of_parents <> '{}' OR place > 1 ORDER BY place;
END
$$;

-- Senders may create streams, but not divide them.
CREATE OR REPLACE FUNCTION {schema}.create_stream(of_app text, of_stream text, shards integer) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM {schema}.add_shards(of_app, of_stream, shards, '{}', NULL);
END
$$;

-- Show hidden shards to workers.
CREATE OR REPLACE FUNCTION {schema}.open_shards(of_app text, names text[]) RETURNS void
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
